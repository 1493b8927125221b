"""Owns the answer to vLLM's question "does this process use the Lockstep CPU platform?"."""

import os

PLATFORM_ENV = "LOCKSTEP_CPU_PLATFORM"
PLATFORM_CLASS = "decode_node.cpu_platform.platform.LockstepCpuPlatform"


def register() -> str | None:
    """Entry point of `vllm.platform_plugins`: the dotted class name if the node asked for it, else None.

    vLLM calls this in every process while it resolves its platform (vllm/platforms/__init__.py), GPU machines
    included, so nothing heavy is imported here.
    """
    return PLATFORM_CLASS if os.environ.get(PLATFORM_ENV) == "1" else None
