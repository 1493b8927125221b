"""Scenario 1: a request comes to a rank that only keeps its busy peer company."""

import asyncio

import httpx
import pytest
from system.harness import Stack, complete_all
from system.scenarios.bodies import K, greedy
from system.step_records import step_records
from system.streams import Stream, running_stream
from system.waiting import until


@pytest.mark.parametrize("idle", [1, 0])
async def test_first_step_is_as_wide_as_all_others(stack: Stack, idle: int) -> None:
    """Idle steps and the arrival's first are 1 + K wide; both ranks are FULL and agree in every step."""
    busy = 1 - idle
    long, stream = greedy(60, seed=60 + idle, max_tokens=3000), Stream()
    arrival = greedy(200, seed=62 + idle, max_tokens=20)
    async with (
        step_records(stack.decode.grpc_address) as log,
        httpx.AsyncClient(base_url=stack.url, timeout=120) as client,
    ):
        await log.quiet()  # the last second of whoever ran before comes late
        async with running_stream(client, long, stream, {"X-data-parallel-rank": str(busy)}):
            await until(lambda: len(stream.token_ids) >= 30, "the busy rank decodes", timeout_s=30)
            await complete_all(stack.url, [arrival], 1, {"X-data-parallel-rank": str(idle)})
            so_far = len(stream.token_ids)
            await until(lambda: len(stream.token_ids) >= so_far + 30, "it still does", timeout_s=30)
            assert not stream.done
        await asyncio.to_thread(stack.wait_idle)
    log.check_lockstep(num_ranks=2, width=1 + K)
    steps = log.of(idle)
    arrived = next(number for number, step in enumerate(steps) if not step.dummy)
    assert arrived >= 10, "the rank was not idle before"
    assert all(step.tokens == 1 + K for step in steps[:arrived])
    assert (steps[arrived].rows, steps[arrived].tokens) == (1, 1 + K)
    assert steps[-1].dummy, "the rank was not idle again after the arrival had ended"
    assert sum(not step.dummy for step in log.of(busy)) >= len(stream.token_ids) // (1 + K)
