"""Owns the statement that vLLM's CPU attention serves uniform decode batches under a full graph.

No graph is captured on CPU. The declaration only keeps vLLM from lowering FULL_DECODE_ONLY to NONE
(vllm/config/compilation.py, `resolve_cudagraph_mode_and_sizes`), so that the real dispatcher and the real DP
agreement decide each step's mode and inputs are padded as for a graph.
"""

from typing import ClassVar

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionMetadataBuilder


class LockstepCpuAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """vLLM's builder, unchanged; it takes padded batches as they are."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH


class LockstepCpuAttentionBackend(CPUAttentionBackend):
    """vLLM's backend under its own name, CPU_ATTN, which is part of NIXL's compatibility hash."""

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return LockstepCpuAttentionMetadataBuilder
