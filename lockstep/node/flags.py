"""Engine flags that both roles set in the same way."""

from typing import Any

from vllm.config import CompilationConfig, CompilationMode
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from lockstep.errors import ConfigError

SETTINGS_KEY = "lockstep"
"""Of `VllmConfig.additional_config`: how a role's flags reach its scheduler in the engine core."""


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


def set_settings(args: AsyncEngineArgs, **settings: Any) -> None:
    """Pass settings on to the engine core, beside what the user gave; raises ConfigError if that has ours."""
    if SETTINGS_KEY in args.additional_config:
        raise ConfigError(f"--additional-config: Lockstep sets {SETTINGS_KEY!r} in it; remove this key")
    args.additional_config = args.additional_config | {SETTINGS_KEY: settings}


def default_compilation(args: AsyncEngineArgs, **cudagraph: Any) -> None:
    """Use these CUDA graph settings where --compilation-config does not name them itself.

    On CPU nothing is compiled: torch.compile would take minutes to start, and the dispatch of
    FULL_DECODE_ONLY does not need it (vllm/v1/cudagraph_dispatcher.py:50).
    """
    compilation: CompilationConfig = args.compilation_config
    for name, value in cudagraph.items():
        if name == "cudagraph_capture_sizes" and _sizes_given(args):
            continue
        if getattr(compilation, name) is None:
            setattr(compilation, name, value)
    if current_platform.is_cpu() and compilation.mode is None:
        compilation.mode = CompilationMode.NONE


def _sizes_given(args: AsyncEngineArgs) -> bool:
    """vLLM has a flag of its own for each of the two as well."""
    return any(
        getattr(owner, name) is not None
        for owner in (args, args.compilation_config)
        for name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
    )
