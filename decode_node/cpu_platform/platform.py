"""Owns the platform class that lets a machine without an accelerator run Lockstep's decode dispatch.

Used by both node kinds, which set LOCKSTEP_CPU_PLATFORM=1; nothing imports it but vLLM.
"""

from dataclasses import dataclass
from typing import Any, Self

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

ATTENTION_BACKEND = "decode_node.cpu_platform.attention.LockstepCpuAttentionBackend"
COMMUNICATOR = "decode_node.cpu_platform.communicator.LockstepCpuCommunicator"
WORKER = "decode_node.cpu_platform.worker.LockstepCpuWorker"


@dataclass(frozen=True, slots=True)
class ResolvedFlags:
    """What vLLM resolved from the node's flags before its CPU platform overwrites it."""

    async_scheduling: bool
    cudagraph_mode: Any
    capture_sizes: list[int] | None
    max_capture_size: int | None

    @classmethod
    def of(cls, vllm_config: Any) -> Self:
        compilation = vllm_config.compilation_config
        return cls(
            async_scheduling=vllm_config.scheduler_config.async_scheduling,
            cudagraph_mode=compilation.cudagraph_mode,
            capture_sizes=compilation.cudagraph_capture_sizes,
            max_capture_size=compilation.max_cudagraph_capture_size,
        )

    def restore(self, vllm_config: Any) -> None:
        compilation = vllm_config.compilation_config
        vllm_config.scheduler_config.async_scheduling = self.async_scheduling
        compilation.cudagraph_mode = self.cudagraph_mode
        compilation.cudagraph_capture_sizes = self.capture_sizes
        compilation.max_cudagraph_capture_size = self.max_capture_size


class LockstepCpuPlatform(CpuPlatform):
    """vLLM's CPU platform with async scheduling, graph dispatch and data parallel MoE left on."""

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        """True: FULL_DECODE_ONLY is dispatched and padded for, though no graph is captured."""
        return True

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Apply vLLM's CPU settings but keep what the flags resolved to.

        By now `async_scheduling` is never None: `VllmConfig.__post_init__` has turned "not said" into True
        and kept a --no-async-scheduling (config/vllm.py:1585-1644), so restoring it honours both. The hook
        runs again in each engine core (v1/engine/core.py:1311) and finds its own results there.
        """
        flags = ResolvedFlags.of(vllm_config)
        parallel_config = vllm_config.parallel_config
        if parallel_config.worker_cls == "auto":
            parallel_config.worker_cls = WORKER
        super().check_and_update_config(vllm_config)
        flags.restore(vllm_config)
        # vLLM picks "mp" here as soon as DP > 1 (config/parallel.py:1035), and its CPU platform for all else:
        # a second process a rank, about 600 MB, only for the OMP environment that the node has set already.
        if parallel_config.world_size == 1 and parallel_config.distributed_executor_backend == "mp":
            parallel_config.distributed_executor_backend = "uni"

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, *args: Any, **kw: Any
    ) -> str:
        path: str = super().get_attn_backend_cls(selected_backend, attn_selector_config, *args, **kw)
        return ATTENTION_BACKEND if path == AttentionBackendEnum.CPU_ATTN.get_path() else path

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return COMMUNICATOR
