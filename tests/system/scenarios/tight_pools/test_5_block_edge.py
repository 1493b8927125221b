"""Scenario 5 at a block's edge: a request that goes back to prefill with whole blocks and one token."""

import asyncio
import uuid

import httpx
import pytest
from system.harness import Stack
from system.proxy_log import RequestLog, request_log
from system.scenarios.bodies import greedy
from system.streams import Stream, stream_completion
from system.waiting import until

BLOCK_TOKENS = 128
MAX_TOKENS = 200
TRIES = 60

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


async def test_goes_back_at_whole_blocks_and_one(tight: Stack) -> None:
    """Tried with other prompt lengths until one breaks off there; all streams are those of requests alone.

    A request of 500 tokens needs its sixth of the 11 blocks at 637, for 3 tokens of a step and 2 of lookahead
    behind the 636 that are computed. One that is a few tokens longer has its own sixth by then and, being the
    younger, loses all.
    """
    length, seen = 505, list[int]()
    for number in range(TRIES):
        older = greedy(500, seed=200 + number, max_tokens=MAX_TOKENS)
        younger = greedy(length, seed=300 + number, max_tokens=MAX_TOKENS)
        entry, streams = await _squeeze(tight, older, younger)
        alone = await asyncio.gather(_ask(tight, older, rank=0), _ask(tight, younger, rank=1))
        assert [stream.token_ids for stream in streams] == [stream.token_ids for stream in alone]
        if not entry.broken_at_tokens:
            continue  # the older one had ended before the pool was full
        seen.append((length + entry.broken_at_tokens[0]) % BLOCK_TOKENS)
        if seen[-1] == 1:
            return
        off_by = (seen[-1] - 1 + BLOCK_TOKENS // 2) % BLOCK_TOKENS - BLOCK_TOKENS // 2
        length -= off_by
    pytest.fail(f"no request broke off one token after a block's edge: {seen}")


async def _squeeze(
    tight: Stack, older: dict[str, object], younger: dict[str, object]
) -> tuple[RequestLog, list[Stream]]:
    """Both on rank 1, the older one first; what the log says of the younger."""
    name = uuid.uuid4().hex
    first = Stream()
    running = asyncio.create_task(_ask(tight, older, rank=1, into=first))
    await until(lambda: bool(first.token_ids), "the older request runs", timeout_s=30)
    second = await _ask(tight, younger, rank=1, request_id=name)
    await running
    return request_log(tight.state_dir / "logs" / "proxy.log", name), [first, second]


async def _ask(
    tight: Stack, body: dict[str, object], rank: int, into: Stream | None = None, request_id: str = ""
) -> Stream:
    headers = {"X-data-parallel-rank": str(rank), "X-Request-Id": request_id or uuid.uuid4().hex}
    async with httpx.AsyncClient(base_url=tight.url, timeout=60) as client:
        return await stream_completion(client, body, into, headers)
