"""Long prompts whose KV moves while prefill computes: what is counted, and whether the answer is pico's."""

import math
from typing import Any

from pico_reference import first_not_greedy
from system.harness import Stack, complete_all, completion_body
from system.prompts import prompts

BLOCK_TOKENS = 128
COUNTED = (
    ("prefill", "streamed_chunks"),
    ("prefill", "pushed_chunks"),
    ("prefill", "pushed_blocks"),
    ("decode", "received_blocks"),
)


async def push_long_prompts(stack: Stack, lengths: list[int], seed: int) -> dict[str, int]:
    """Complete fresh prompts and check every answer against pico itself; returns what was counted."""
    bodies = [completion_body(p, max_tokens=40, ignore_eos=True) for p in prompts(lengths, seed=seed)]
    stack.wait_idle()
    before = _events(stack)
    answers: list[dict[str, Any]] = await complete_all(stack.url, bodies, concurrency=4)
    stack.wait_idle()
    for body, answer in zip(bodies, answers, strict=True):
        token_ids = answer["choices"][0]["token_ids"]
        assert len(token_ids) == 40
        assert first_not_greedy(body["prompt"], token_ids) is None
    return {kind: count - before[kind] for kind, count in _events(stack).items()}


def blocks_of(lengths: list[int]) -> int:
    return sum(math.ceil(length / BLOCK_TOKENS) for length in lengths)


def _events(stack: Stack) -> dict[str, int]:
    return {kind: int(stack.node(role).kv_events(kind)) for role, kind in COUNTED}
