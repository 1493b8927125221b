"""`lockstep up smollm2`: a small model that writes sensible English, fetched at first use."""

from lockstep.cli.smollm2.ready import NAME, provide

__all__ = ["NAME", "provide"]
