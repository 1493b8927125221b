"""Lends the benchmarks the servers that the system tests start; neither folder is an installed package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from system.harness import Node, Series, Stack, complete_all, completion_body, run_stack, wait_until
from system.processes import kill_all
from system.prompts import prompts
from system.servers import run_node, run_proxy, run_reference
from system.stock_pair import PROGRESS_PLUGIN as NIXL_PROGRESS_PLUGIN
from system.streams import Stream, stream_completion
from system.vllm_plugin import write_vllm_plugin

SERVED_CONTEXT = "4091"
"""Tokens, of the stack by default: 4096 - K * 2 batches in flight - 1."""

__all__ = [
    "NIXL_PROGRESS_PLUGIN",
    "SERVED_CONTEXT",
    "Node",
    "Series",
    "Stack",
    "Stream",
    "complete_all",
    "completion_body",
    "kill_all",
    "prompts",
    "run_node",
    "run_proxy",
    "run_reference",
    "run_stack",
    "stream_completion",
    "wait_until",
    "write_vllm_plugin",
]
