"""Which KV cache groups are streamed, and in which configurations none is."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kv_transfer.groups import group_layouts
from kv_transfer.push_plan import GroupLayout

SIZES: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(**SIZES)
WINDOW = SlidingWindowSpec(**SIZES, sliding_window=64)
SPECS = {
    "full attention": (FULL, True),
    "MLA": (MLAAttentionSpec(**SIZES | {"num_kv_heads": 1}), True),
    "layers of different sizes": (
        UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": FULL, "b": FULL}),
        True,
    ),
    "sliding window": (WINDOW, False),
    "chunked local": (ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=64), False),
    "state": (MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,)), False),
    "sinks": (SinkFullAttentionSpec(**SIZES, sink_len=4), False),
}


def config(**parallel: int) -> Any:
    sizes = {"prefill_context_parallel_size": 1, "decode_context_parallel_size": 1} | parallel
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes), kv_transfer_config=SimpleNamespace(kv_buffer_device="cpu")
    )


def layouts(spec: Any, **parallel: int) -> tuple[GroupLayout, ...]:
    groups = [KVCacheGroupSpec(["layer"], spec)]
    return group_layouts(config(**parallel), KVCacheConfig(8, [], groups))


@pytest.mark.parametrize(("spec", "streamed"), SPECS.values(), ids=SPECS.keys())
def test_only_full_attention_is_streamed(spec: Any, streamed: bool) -> None:
    """Other kinds give blocks back during prefill or are final only at its end."""
    assert layouts(spec) == (GroupLayout(32, streamed),)


@pytest.mark.parametrize("size", ["prefill_context_parallel_size", "decode_context_parallel_size"])
def test_nothing_is_streamed_where_ranks_share_blocks(size: str) -> None:
    """With context parallelism a block is not one rank's own."""
    assert layouts(FULL, **{size: 2}) == (GroupLayout(32, streamed=False),)
