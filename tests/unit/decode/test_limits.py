"""The numbers that keep decode steps uniform."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode

from decode_node.limits import capture_sizes, check_lockstep, served_context_limit
from lockstep.errors import ConfigError


def vllm_config(**changes: Any) -> Any:
    """The resolved settings of a group that holds: K = 2, 4 sequences, asynchronous."""
    values = {
        "k": 2,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 2048,
        "mode": CUDAGraphMode.FULL_DECODE_ONLY,
        "sizes": [3, 6, 12],
        "pp": 1,
        "threshold": 0,
        "max_model_len": 4096,
        "batches": 2,
    } | changes
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=values["k"]) if values["k"] else None,
        scheduler_config=SimpleNamespace(
            max_num_seqs=values["max_num_seqs"],
            max_num_batched_tokens=values["max_num_batched_tokens"],
            long_prefill_token_threshold=values["threshold"],
        ),
        compilation_config=SimpleNamespace(
            cudagraph_mode=values["mode"], cudagraph_capture_sizes=values["sizes"]
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=values["pp"]),
        model_config=SimpleNamespace(max_model_len=values["max_model_len"]),
        max_concurrent_batches=values["batches"],
    )


@pytest.mark.parametrize(
    ("k", "max_num_seqs", "sizes"),
    [
        (2, 4, [3, 6, 12]),
        (2, 6, [3, 6, 12, 18]),
        (0, 3, [1, 2, 3]),
        (1, 1, [2]),
        (3, 5, [4, 8, 16, 20]),
    ],
)
def test_capture_sizes_end_with_the_largest_batch(k: int, max_num_seqs: int, sizes: list[int]) -> None:
    """(1 + K) times powers of two, and always times max_num_seqs."""
    assert capture_sizes(k, max_num_seqs) == sizes


@pytest.mark.parametrize(("k", "batches", "limit"), [(2, 2, 4091), (2, 1, 4093), (0, 2, 4095), (3, 2, 4089)])
def test_served_context_limit(k: int, batches: int, limit: int) -> None:
    """max_model_len - K * batches in flight - 1."""
    assert served_context_limit(vllm_config(k=k, batches=batches)) == limit


def test_a_good_group_passes() -> None:
    check_lockstep(vllm_config())


@pytest.mark.parametrize(
    ("changes", "flag", "value"),
    [
        ({"mode": CUDAGraphMode.NONE}, "--compilation-config", "FULL_DECODE_ONLY"),
        ({"mode": CUDAGraphMode.PIECEWISE}, "--compilation-config", "FULL_DECODE_ONLY"),
        ({"sizes": [3, 6]}, "--compilation-config", "12"),
        ({"sizes": []}, "--compilation-config", "12"),
        ({"max_num_batched_tokens": 11}, "--max-num-batched-tokens", "12"),
        # vLLM keeps no capture size above the budget; the flag that was given is the one to name.
        ({"max_num_batched_tokens": 8, "sizes": [3, 6]}, "--max-num-batched-tokens", "12"),
        ({"threshold": 2}, "--long-prefill-token-threshold", "0"),
        ({"pp": 2}, "--pipeline-parallel-size", "1"),
        ({"max_model_len": 6}, "--max-model-len", "larger"),
    ],
)
def test_a_group_that_would_leave_the_graph_is_refused(
    changes: dict[str, Any], flag: str, value: str
) -> None:
    """The message names the flag and a value that works."""
    with pytest.raises(ConfigError, match=flag) as raised:
        check_lockstep(vllm_config(**changes))
    assert value in str(raised.value)
