"""Scenario 9: clients leave in every stage of their requests, two hundred of them."""

import asyncio
import contextlib
import random
import time
from typing import Any

import httpx
import pytest
from system.harness import Stack
from system.processes import engines
from system.scenarios.bodies import QUEUED, greedy
from system.streams import Stream, stream_completion
from system.waiting import until

pytestmark = pytest.mark.full

CLIENTS = 200
STAGES = 5
ANSWERED_S = 10.0
LENGTHS = (5, 60, 200, 700)


async def test_two_hundred_clients_leave(stack: Stack, scenario_reference: dict[str, dict[str, Any]]) -> None:
    """While they queue, during prefill, with the first token (its KV is under way), in mid-answer.

    Then a short request is answered within seconds, and no engine has ended.
    """
    before = {node.role: engines(node) for node in (stack.prefill, stack.decode)}
    chosen = random.Random(9)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=stack.url, timeout=120, limits=limits) as client:
        async with asyncio.timeout(120):
            left = await asyncio.gather(
                *(_leave(client, number, chosen.random()) for number in range(CLIENTS))
            )
        began = time.monotonic()
        stream = await asyncio.wait_for(stream_completion(client, QUEUED[0]), ANSWERED_S)
    assert time.monotonic() - began < ANSWERED_S
    assert stream.token_ids == scenario_reference["queued-0"]["choices"][0]["token_ids"]
    assert {node.role: engines(node) for node in (stack.prefill, stack.decode)} == before
    # The storm was one: clients left without a token, with the first one, and in mid-answer.
    assert sum(tokens == 0 for tokens in left) >= CLIENTS // STAGES
    assert sum(tokens > 0 for tokens in left) >= CLIENTS // STAGES


async def _leave(client: httpx.AsyncClient, number: int, luck: float) -> int:
    """One client; returns how many tokens it had when it left."""
    body = greedy(LENGTHS[number % len(LENGTHS)], seed=900 + number, max_tokens=300)
    stream = Stream()
    await asyncio.sleep(number * 0.01)
    task = asyncio.create_task(stream_completion(client, body, stream))
    stage = number % STAGES
    if stage == 0:
        await asyncio.sleep(0.02 * luck)
    elif stage == 1:
        await asyncio.sleep(0.1 + 0.4 * luck)
    elif stage == 4:
        await asyncio.sleep(4 * luck)
    else:
        tokens = 1 if stage == 2 else 2 + int(20 * luck)
        await until(lambda: len(stream.token_ids) >= tokens or task.done(), "tokens", timeout_s=110)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return len(stream.token_ids)
