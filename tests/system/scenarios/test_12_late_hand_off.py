"""Scenario 12: decode takes a request's KV up long after prefill has it, beyond the lease or renewing it."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from system.harness import Stack, run_stack
from system.kv_checks import kv_moves_and_returns
from system.scenarios.bodies import QUEUED, SMALL, greedy
from system.streams import Stream, running_stream, stream_completion, stream_or_error
from system.waiting import until

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

LEASE_S = 6
QUEUED_S = 60.0
RANK = {"X-data-parallel-rank": "0"}


@pytest.fixture(scope="module")
def brief(
    tmp_path_factory: pytest.TempPathFactory, scenario_reference: dict[str, dict[str, Any]]
) -> Iterator[Stack]:
    """A stack with the shortest lease, whose decode ranks run one request at a time."""
    flags = [f"--{role}-arg=--kv-lease-s={LEASE_S}" for role in ("prefill", "decode")]
    with run_stack(tmp_path_factory.mktemp("brief"), *flags, "--decode-arg=--max-num-seqs=1") as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_left_over(brief: Stack) -> Iterator[None]:
    with kv_moves_and_returns(brief):
        yield


def expired(stack: Stack) -> float:
    return stack.prefill.kv_events("leases_expired")


async def test_decode_leg_that_comes_after_the_lease(
    brief: Stack, scenario_reference: dict[str, dict[str, Any]]
) -> None:
    """The decode node's own process is frozen, not its engines: the leg reaches them when prefill has given
    the blocks back. The reference's text, or an error, and never other text."""
    before = expired(brief)
    async with httpx.AsyncClient(base_url=brief.url, timeout=120) as client:
        os.kill(brief.decode.pid, signal.SIGSTOP)
        try:
            stream = Stream()
            running = asyncio.create_task(stream_or_error(client, SMALL[-1], stream))
            await until(
                lambda: expired(brief) > before or running.done(), "the lease is over", timeout_s=4 * LEASE_S
            )
        finally:
            os.kill(brief.decode.pid, signal.SIGCONT)
        expected = scenario_reference[f"small-{len(SMALL) - 1}"]["choices"][0]["token_ids"]
        await asyncio.wait_for(running, 60)
    assert stream.token_ids == expected[: len(stream.token_ids)]
    assert (stream.finish_reason == "length") == (stream.error is None)
    assert stream.error is not None or stream.token_ids == expected


async def test_request_that_queues_on_decode_for_a_minute(
    brief: Stack, scenario_reference: dict[str, dict[str, Any]]
) -> None:
    """Ten leases long: its KV is kept on prefill, and the answer is the reference's."""
    before = expired(brief)
    async with httpx.AsyncClient(base_url=brief.url, timeout=300) as client, AsyncExitStack() as others:
        for number in range(8):
            ahead = Stream()
            body = greedy(30 + number, seed=1200 + number, max_tokens=3900)
            await others.enter_async_context(running_stream(client, body, ahead, RANK))
            await until(lambda ahead=ahead: bool(ahead.token_ids), "it has its place", timeout_s=60)
        began, stream = time.monotonic(), Stream()
        running = asyncio.create_task(stream_completion(client, QUEUED[0], stream, RANK))
        await until(lambda: time.monotonic() - began > QUEUED_S, "a minute", timeout_s=2 * QUEUED_S)
        assert not running.done()
        assert len(stream.token_ids) <= 1, "decode had room for it"
        await others.aclose()
        await asyncio.wait_for(running, 60)
    expected = scenario_reference["queued-0"]["choices"][0]
    assert (stream.token_ids, stream.finish_reason, stream.error) == (expected["token_ids"], "length", None)
    assert expired(brief) == before
