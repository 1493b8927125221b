"""What the Lockstep services share: command line, RPC, node runtime, configuration, errors, logging."""
