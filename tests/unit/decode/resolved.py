"""Configurations of a decode node that vLLM itself resolved, as on a device with graphs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from decode_node.config import DecodeConfig
from decode_node.cpu_platform.platform import LockstepCpuPlatform
from decode_node.service import ROLE

PICO = Path(__file__).resolve().parents[3] / "models" / "pico"
MTP = {"method": "mtp", "num_speculative_tokens": 2}


@contextmanager
def graph_platform() -> Iterator[None]:
    """The plugin's platform, which a node has from its first import on."""
    stock = current_platform.__class__
    current_platform.__class__ = LockstepCpuPlatform
    try:
        yield
    finally:
        current_platform.__class__ = stock


def decode_args(flags: dict[str, Any], **node_flags: Any) -> AsyncEngineArgs:
    """vLLM's flags after the decode role set its own."""
    args = AsyncEngineArgs(**{"model": str(PICO), "speculative_config": MTP} | flags)
    ROLE.apply_flags(args, DecodeConfig(**node_flags))
    return args


def resolved(flags: dict[str, Any], **node_flags: Any) -> VllmConfig:
    """What vLLM makes of them; it reads the model's config.json, no weights."""
    with graph_platform():
        return decode_args(flags, **node_flags).create_engine_config(UsageContext.OPENAI_API_SERVER)
