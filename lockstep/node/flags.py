"""Engine flags that both roles set in the same way."""

from typing import Any

from vllm.config import CompilationConfig, CompilationMode
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from lockstep.errors import ConfigError


def kv_buffer_device() -> str:
    """The device whose memory NIXL moves: the KV cache's own."""
    return str(current_platform.device_type)


def set_owned(args: AsyncEngineArgs, name: str, value: Any) -> None:
    """Set a flag that the role owns; raises ConfigError when the user gave another value."""
    default = getattr(AsyncEngineArgs, name)
    given = getattr(args, name)
    if given not in (None, default, value):
        flag = "--" + name.replace("_", "-")
        raise ConfigError(f"{flag}: Lockstep sets this to {value!r}; remove this flag")
    setattr(args, name, value)


def default_compilation(args: AsyncEngineArgs, **cudagraph: Any) -> None:
    """Use these CUDA graph settings where --compilation-config names none of its own.

    On CPU nothing is compiled: torch.compile would take minutes to start, and the dispatch of
    FULL_DECODE_ONLY does not need it (vllm/v1/cudagraph_dispatcher.py:50).
    """
    compilation: CompilationConfig = args.compilation_config
    given = compilation.cudagraph_mode is not None or compilation.cudagraph_capture_sizes is not None
    if not given:
        for name, value in cudagraph.items():
            setattr(compilation, name, value)
    if current_platform.is_cpu() and compilation.mode is None:
        compilation.mode = CompilationMode.NONE
