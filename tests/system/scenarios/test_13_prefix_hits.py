"""Scenario 13: prompts around the edges of a block, asked again, and chats that grow."""

import math
from typing import Any

import httpx
import pytest
from pico_reference import first_not_greedy
from system.harness import Stack, complete_all, completion_body
from system.prompts import prompts
from system.scenarios.bodies import AROUND_A_BLOCK, BLOCK_TOKENS

Answers = dict[str, dict[str, Any]]


def ids(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["choices"][0]["token_ids"] for answer in answers]


async def ask(stack: Stack, bodies: list[dict[str, Any]], concurrency: int) -> tuple[list[list[int]], float]:
    """Complete them on decode's rank 0; returns the token ids and the KV blocks that moved."""
    stack.wait_idle()  # so that what was pushed before is counted
    before = pushed_blocks(stack)
    answers = await complete_all(stack.url, bodies, concurrency, {"X-data-parallel-rank": "0"})
    stack.wait_idle()
    return ids(answers), pushed_blocks(stack) - before


def pushed_blocks(stack: Stack) -> float:
    return stack.prefill.kv_events("pushed_blocks")


@pytest.mark.parametrize("concurrency", [1, 8])
async def test_around_a_block_and_again(stack: Stack, scenario_reference: Answers, concurrency: int) -> None:
    """Equal to the reference, and so is the repeat, which moves less: what decode has is not pushed."""
    expected = ids([scenario_reference[f"block-{length}"] for length in AROUND_A_BLOCK])
    bodies = list(AROUND_A_BLOCK.values())
    first, _ = await ask(stack, bodies, concurrency)
    again, moved = await ask(stack, bodies, concurrency)
    assert first == expected
    assert again == expected
    assert moved == sum(blocks(length) - cached_blocks(length) for length in AROUND_A_BLOCK)


async def test_growing_chat(stack: Stack) -> None:
    """Each turn is the last prompt, its answer and more. The answers are pico's; only what is new moves."""
    prompt: list[int] = []
    known = 0
    for words in prompts([150, 90, 170, 60], seed=110):
        prompt += words
        (answer,), moved = await ask(stack, [completion_body(prompt, max_tokens=40, ignore_eos=True)], 1)
        assert len(answer) == 40
        assert first_not_greedy(prompt, answer) is None
        assert moved == blocks(len(prompt)) - cached_blocks(known)
        prompt = prompt + answer
        known = len(prompt)


async def test_proxy_knows_what_prefill_has_cached(stack: Stack) -> None:
    """By the engine's own KV events, hashed alike: of each turn, all whole blocks of the one before it."""
    prompt: list[int] = []
    for words in prompts([150, 75, 33], seed=111):
        known, before = len(prompt), routed_cached_tokens(stack)
        prompt += words
        await ask(stack, [completion_body(prompt, max_tokens=1)], 1)
        assert routed_cached_tokens(stack) - before == known // BLOCK_TOKENS * BLOCK_TOKENS


def routed_cached_tokens(stack: Stack) -> float:
    """Of all prompts so far, what the proxy knew the prefill rank to have."""
    lines = httpx.get(f"{stack.url}/metrics", timeout=10).text.splitlines()
    (line,) = (line for line in lines if line.startswith('lockstep_proxy_routed_tokens_total{cached="yes"}'))
    return float(line.rpartition(" ")[2])


def blocks(length: int) -> int:
    """Of a prompt, the partly filled one with it."""
    return math.ceil(length / BLOCK_TOKENS)


def cached_blocks(length: int) -> int:
    """What a rank that has seen so many tokens of a prompt takes from its prefix cache.

    Never the last token (kv_cache_manager.py:295), and with a drafter one block less, since that wants the
    hidden states of the token before (single_type_kv_cache_manager.py, `use_eagle`).
    """
    return max(0, (length - 1) // BLOCK_TOKENS - 1)
