"""Plain vLLM servers as the peers use them: the flags that all engines share, and their environment."""

import json
import os
import sys
from collections.abc import Mapping

from bench.harness import SERVED_CONTEXT
from bench.load import PICO
from bench.peers.processes import Program
from lockstep.cli.plan import CPU_KV_CACHE_BYTES
from lockstep.cli.ports import PortPicker

K = 2
MAX_NUM_SEQS = 16

SHARED_FLAGS = (
    *("--dtype", "float32", "--max-num-seqs", str(MAX_NUM_SEQS)),
    *("--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": K})),
    *("--kv-cache-memory-bytes", str(CPU_KV_CACHE_BYTES)),
)
"""Of every engine of every system; the block size is vLLM's for a CPU (128) everywhere."""

PLAIN_FLAGS = (
    *("--model", str(PICO), "--served-model-name", "pico", *SHARED_FLAGS),
    *("--max-model-len", SERVED_CONTEXT, "--enforce-eager"),
)
"""Eager, since Lockstep's engines run the model without torch.compile on a CPU too."""

API_SERVER = (sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server")


def environment(**extra: str) -> dict[str, str]:
    """One thread an engine, as Lockstep's have, and nothing of Lockstep: its vLLM plugins stay unloaded."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("LOCKSTEP_", "VLLM_"))}
    return (
        ours
        | {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_PLUGINS": "",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        | extra
    )


def server(name: str, port: int, *flags: str, extra: Mapping[str, str] | None = None) -> Program:
    """vLLM's own OpenAI server."""
    argv = (*API_SERVER, *PLAIN_FLAGS, "--host", "127.0.0.1", "--port", str(port), *flags)
    return Program(name, argv, environment(**(extra or {})))


def transfer_flags(connector: str, role: str) -> tuple[str, str]:
    """`--kv-transfer-config` for host memory; `role` is kv_producer, kv_consumer or kv_both."""
    config = {"kv_connector": connector, "kv_role": role, "kv_buffer_device": "cpu"}
    return ("--kv-transfer-config", json.dumps(config))


def side_channel(ports: PortPicker) -> dict[str, str]:
    """A NIXL side channel of its own, which each server on a host needs."""
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.take()),
    }
