"""The numbers that keep decode steps uniform, on configurations that vLLM resolved."""

import re
from typing import Any

import pytest
from unit.decode.resolved import MTP, decode_args, graph_platform, resolved
from vllm.config import CUDAGraphMode

from decode_node.graphs import capture_sizes, full_graph_tokens
from decode_node.limits import check_engine, check_lockstep, served_context_limit
from lockstep.errors import ConfigError
from lockstep.graphs import uncovered_batch
from lockstep.node.facts import EngineFacts

FOUR = {"max_num_seqs": 4, "max_model_len": 512}


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


@pytest.mark.parametrize(
    ("flags", "limit"),
    [
        ({}, 507),
        ({"async_scheduling": False}, 509),
        ({"speculative_config": None}, 511),
        ({"speculative_config": MTP | {"num_speculative_tokens": 3}}, 505),
    ],
)
def test_served_context_limit(flags: dict[str, Any], limit: int) -> None:
    """max_model_len - K * batches in flight - 1."""
    assert served_context_limit(resolved(FOUR | flags)) == limit


@pytest.mark.parametrize("k", [0, 1, 2, 3, 7])
def test_defaults_are_a_lockstep_group(k: int) -> None:
    """Who gives only the model and its drafter gets 256 requests, a full graph for each batch of them."""
    speculative = {"method": "mtp", "num_speculative_tokens": k} if k else None
    config = resolved({"speculative_config": speculative})
    check_lockstep(config)
    assert config.scheduler_config.max_num_seqs == 256
    assert full_graph_tokens(config) == capture_sizes(k, 256)
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY
    assert config.scheduler_config.async_scheduling


@pytest.mark.parametrize(
    ("flags", "max_num_seqs", "max_num_batched_tokens"),
    [
        ({"max_num_seqs": 1000}, 1000, 3000),
        ({"max_num_batched_tokens": 64}, 21, 64),
        ({"max_num_batched_tokens": 4096}, 256, 4096),
        ({"all2all_backend": "deepep_low_latency"}, 256, 768),
    ],
)
def test_what_was_given_of_the_batch_bounds_the_rest(
    flags: dict[str, Any], max_num_seqs: int, max_num_batched_tokens: int
) -> None:
    """Rows follow a given budget, and the budget given rows; K = 2."""
    with graph_platform():
        args = decode_args(flags)
    assert (args.max_num_seqs, args.max_num_batched_tokens) == (max_num_seqs, max_num_batched_tokens)
    check_lockstep(resolved(flags | {"all2all_backend": "naive"} if "all2all_backend" in flags else flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"max_num_batched_tokens": 8},
            "--max-num-batched-tokens: must be at least 12, which is --max-num-seqs 4 times 1 + K = 3 "
            "(got 8); give 12, or --max-num-seqs 2",
        ),
        (
            {"max_num_scheduled_tokens": 11},
            "--max-num-scheduled-tokens: must be at least 12, which is --max-num-seqs 4 times 1 + K = 3 "
            "(got 11); remove this flag",
        ),
        (
            {"long_prefill_token_threshold": 2},
            "--long-prefill-token-threshold: 2 would clip decode rows of 1 + K = 3 tokens; give 0",
        ),
        (
            {"enforce_eager": True},
            "--compilation-config: the CUDA graph mode resolved to NONE; decode needs "
            '{"cudagraph_mode": "FULL_DECODE_ONLY"} and no --enforce-eager',
        ),
        (
            {"compilation_config": {"cudagraph_mode": "NONE"}},
            "--compilation-config: the CUDA graph mode resolved to NONE",
        ),
        (
            {"cudagraph_capture_sizes": [1, 2, 4, 8]},
            "--compilation-config: the full graphs for [3, 6] tokens leave out a step of 3 requests, which "
            "has 9 (--max-num-seqs 4, 1 + K = 3); give no cudagraph_capture_sizes, or [3, 6, 12]",
        ),
        (
            {"compilation_config": {"cudagraph_capture_sizes": [3, 6, 15]}},
            "--compilation-config: the full graphs for [3, 6] tokens leave out a step of 3 requests",
        ),
        (
            {"max_cudagraph_capture_size": 9},
            "--compilation-config: the full graphs for [3, 6] tokens leave out a step of 3 requests",
        ),
        (
            {"speculative_config": MTP | {"disable_padded_drafter_batch": True}},
            "--no-async-scheduling: vLLM turned asynchronous scheduling off",
        ),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size: a decode node runs without; give 1"),
        (
            {"max_model_len": 6},
            "--max-model-len: 6 leaves no room for a prompt and one token below the margin of 5; give at "
            "least 7",
        ),
    ],
)
def test_a_group_that_would_leave_the_graph_is_refused(flags: dict[str, Any], message: str) -> None:
    """The message names the flag, what vLLM resolved, and a value that works."""
    config = resolved(FOUR | flags)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        check_lockstep(config)


def test_what_the_message_advises_works() -> None:
    """Both ways out of the tiny token budget."""
    check_lockstep(resolved(FOUR | {"max_num_batched_tokens": 12}))
    check_lockstep(resolved(FOUR | {"max_num_batched_tokens": 8, "max_num_seqs": 2}))
    check_lockstep(resolved(FOUR | {"max_model_len": 7}))


def test_a_threshold_of_a_whole_row_is_fine() -> None:
    """It clips nothing."""
    check_lockstep(resolved(FOUR | {"long_prefill_token_threshold": 3}))


@pytest.mark.parametrize(
    ("sizes", "uncovered"),
    [([3, 6, 12], 0), ([12], 0), ([3, 6], 3), ([3, 6, 9], 4), ([3, 6, 15], 3), ([15], 1)],
)
def test_coverage_is_what_the_dispatcher_does(sizes: list[int], uncovered: int) -> None:
    """The first batch of 1 to 4 requests whose step vLLM's own dispatcher runs without a full graph."""
    config = resolved(FOUR | {"cudagraph_capture_sizes": sizes})
    assert uncovered_batch(full_graph_tokens(config), 3, 4) == uncovered
    assert next((n for n in range(1, 5) if not _dispatched_full(config, 3 * n)), 0) == uncovered


def _dispatched_full(config: Any, num_tokens: int) -> bool:
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    compilation = config.compilation_config
    compilation.adjust_cudagraph_sizes_for_spec_decode(3)
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(compilation.cudagraph_mode, 3)
    mode, _ = dispatcher.dispatch(num_tokens, uniform_decode=True)
    return bool(mode == CUDAGraphMode.FULL)


def facts(mode: str, sizes: list[int]) -> EngineFacts:
    return EngineFacts("x.S", True, mode, sizes, num_kv_blocks=100, records_steps=True)


def test_a_mode_that_the_backend_took_away_is_refused() -> None:
    """Only the engine core knows it, after the weights are loaded."""
    config = resolved(FOUR)
    check_engine(config, facts("FULL_DECODE_ONLY", [3, 6, 12]))
    with pytest.raises(ConfigError, match=r"^--attention-backend: the CUDA graph mode became PIECEWISE"):
        check_engine(config, facts("PIECEWISE", []))
    with pytest.raises(ConfigError, match="leave out a step of 3 requests"):
        check_engine(config, facts("FULL_DECODE_ONLY", [3, 6]))
