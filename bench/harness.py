"""Lends the benchmarks the servers that the system tests start; neither folder is an installed package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from system.harness import Series, Stack, complete_all, completion_body, run_stack, wait_until

try:
    from system.servers import run_reference
except ImportError:
    from system.harness import run_reference

__all__ = ["Series", "Stack", "complete_all", "completion_body", "run_reference", "run_stack", "wait_until"]
