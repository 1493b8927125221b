"""The decode group in lockstep: full graphs on both ranks, drafts accepted, exactly the needed KV moved."""

import math
from typing import Any

from system.harness import Node, Series, Stack, complete_all, completion_body
from system.prompts import LENGTHS, prompts

STEPS = "lockstep_decode_steps_total"


def _grown(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {rank: value - before.get(rank, 0.0) for rank, value in after.items()}


def _new_steps(node: Node, before: Series) -> dict[str, dict[tuple[str, str], float]]:
    """Per rank: (mode, cause) to the number of steps since `before`."""
    steps: dict[str, dict[tuple[str, str], float]] = {}
    for labels, value in node.metric(STEPS).items():
        named = dict(labels)
        new = value - before.get(labels, 0.0)
        if new:
            steps.setdefault(named["rank"], {})[named["mode"], named["cause"]] = new
    return steps


async def test_steps_are_full_on_both_ranks(stack: Stack) -> None:
    """At concurrency 8, at least 99 % of the steps of each rank are FULL, and every other one says why."""
    before = stack.decode.metric(STEPS)
    bodies = [completion_body(p, max_tokens=64, ignore_eos=True) for p in prompts(LENGTHS, seed=2)]
    await complete_all(stack.url, bodies, concurrency=8)
    stack.wait_idle()
    steps = _new_steps(stack.decode, before)
    assert set(steps) == {"0", "1"}
    for rank, counts in steps.items():
        full = sum(count for (mode, _), count in counts.items() if mode == "FULL")
        assert full >= 100, (rank, counts)
        assert full / sum(counts.values()) >= 0.99, (rank, counts)
        assert all(cause for mode, cause in counts if mode != "FULL"), (rank, counts)


async def test_idle_rank_steps_with_its_peer(stack: Stack) -> None:
    """One request runs on one rank; the other rank makes as many steps, all FULL."""
    before = stack.decode.metric(STEPS)
    body = completion_body(prompts([40], seed=3)[0], max_tokens=120, ignore_eos=True)
    await complete_all(stack.url, [body], concurrency=1)
    stack.wait_idle()
    steps = _new_steps(stack.decode, before)
    assert set(steps) == {"0", "1"}
    assert all(mode == "FULL" for counts in steps.values() for mode, _ in counts), steps
    totals = [sum(counts.values()) for counts in steps.values()]
    assert min(totals) >= 40  # 120 tokens, at most 3 a step
    assert abs(totals[0] - totals[1]) <= 2, steps  # a poll may fall between the two ranks' last steps


async def test_both_ranks_are_used_and_accept_drafts(stack: Stack) -> None:
    """Requests spread over the ranks, and on each of them MTP drafts are verified and accepted."""
    drafts = stack.decode.by_rank("lockstep_draft_tokens_total")
    accepted = stack.decode.by_rank("lockstep_accepted_tokens_total")
    bodies = [completion_body(p, max_tokens=64, ignore_eos=True) for p in prompts(LENGTHS, seed=4)]
    await complete_all(stack.url, bodies, concurrency=8)
    stack.wait_idle()
    new_drafts = _grown(stack.decode.by_rank("lockstep_draft_tokens_total"), drafts)
    new_accepted = _grown(stack.decode.by_rank("lockstep_accepted_tokens_total"), accepted)
    assert set(new_drafts) == {"0", "1"}
    # pico's own rate is .91 and .79 for the two positions; the first step of a request has placeholders.
    for rank in new_drafts:
        assert 0.5 < new_accepted[rank] / new_drafts[rank] <= 1.0, (rank, new_drafts, new_accepted)


async def test_kv_bytes_moved_are_what_the_blocks_say(stack: Stack) -> None:
    """Fresh prompts: bytes pushed = blocks of each prompt, each block over all layers, no more."""
    lengths = [7, 128, 129, 300, 384, 400]
    bytes_before = sum(stack.prefill.by_rank("lockstep_kv_pushed_bytes_total").values())
    fresh = [completion_body(prompt, max_tokens=8) for prompt in prompts(lengths, seed=5)]
    await complete_all(stack.url, fresh, concurrency=2)
    stack.wait_idle()
    per_block = _bytes_per_block(stack)
    # 5 layers (4 and the MTP layer) of keys and values, 2 heads of 64, float32, 128 tokens a block.
    assert per_block == 5 * 2 * 2 * 64 * 4 * 128
    moved = sum(stack.prefill.by_rank("lockstep_kv_pushed_bytes_total").values()) - bytes_before
    assert moved == sum(math.ceil(length / 128) for length in lengths) * per_block


async def test_a_repeated_prompt_moves_fewer_bytes(stack: Stack) -> None:
    """What a decode rank has cached is not sent again; pinned to one rank, since each has its own cache.

    300 tokens are 2 full blocks and a part. vLLM takes only 1 of the 2 from its cache: the drafter needs the
    hidden states of the last one (v1/core/kv_cache_coordinator.py, `use_eagle`).
    """
    prompt = prompts([300], seed=6)[0]
    moved: list[float] = []
    answers: list[dict[str, Any]] = []
    for _ in range(2):
        before = sum(stack.prefill.by_rank("lockstep_kv_pushed_bytes_total").values())
        answers += await complete_all(stack.url, [completion_body(prompt)], 1, {"X-data-parallel-rank": "1"})
        stack.wait_idle()
        moved.append(sum(stack.prefill.by_rank("lockstep_kv_pushed_bytes_total").values()) - before)
    assert moved == [3 * _bytes_per_block(stack), 2 * _bytes_per_block(stack)]
    assert answers[0]["choices"][0]["token_ids"] == answers[1]["choices"][0]["token_ids"]


def _bytes_per_block(stack: Stack) -> float:
    return stack.prefill.by_rank("lockstep_kv_block_bytes")["0"]
