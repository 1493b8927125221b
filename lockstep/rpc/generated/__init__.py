"""Generated from lockstep.proto by `python -m lockstep.rpc.generate`; do not edit."""
