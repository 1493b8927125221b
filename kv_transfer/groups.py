"""Which KV cache groups of a model can be pushed while the prompt is still being computed."""

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, iter_layer_specs

from kv_transfer.push_plan import GroupLayout

# Exactly these. Sliding windows give blocks back during prefill, state-space models keep one state that is
# final only at the end, and subclasses may do either (sinks, recycled windows).
_STREAMED_SPECS = (FullAttentionSpec, MLAAttentionSpec)


def group_layouts(vllm_config: Any, kv_cache_config: Any) -> tuple[GroupLayout, ...]:
    """The layout of each transferable group (`KVCacheConfig.transfer_groups`), in that order.

    Nothing is streamed through a host buffer (vLLM saves to it step by step, base_scheduler.py
    `_build_save_meta`) nor when a context-parallel rank holds a share of each block.
    """
    parallel_config = vllm_config.parallel_config
    whole_blocks = (
        parallel_config.prefill_context_parallel_size == 1
        and parallel_config.decode_context_parallel_size == 1
        and not _uses_host_buffer(vllm_config)
    )
    return tuple(
        GroupLayout(
            block_size=group.kv_cache_spec.block_size,
            streamed=whole_blocks
            and all(type(spec) in _STREAMED_SPECS for spec in iter_layer_specs(group.kv_cache_spec)),
        )
        for group in kv_cache_config.transfer_groups
    )


def _uses_host_buffer(vllm_config: Any) -> bool:
    """As base_scheduler.py derives `use_host_buffer`."""
    on_cpu = current_platform.device_type == "cpu"
    return not on_cpu and vllm_config.kv_transfer_config.kv_buffer_device == "cpu"
