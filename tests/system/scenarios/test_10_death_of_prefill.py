"""Scenario 10: the prefill node is killed before the handshake or in mid-transfer, or frozen in it."""

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from system.harness import Node, Stack, complete_all, run_stack
from system.kv_checks import QUARANTINED, plain_request
from system.processes import comes_back, engines, signal_engine
from system.scenarios.bodies import QUEUED, greedy
from system.servers import run_node, run_proxy
from system.streams import Stream, stream_completion, stream_or_error
from system.waiting import until

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

DEADLINE_S = 8.0
"""--registration-deadline-s of the decode node."""
NOTICED_S = 5.0


@dataclass(frozen=True)
class Cluster:
    """A stack, and beside it a second prefill node that only `url` knows too."""

    stack: Stack
    second: Node
    url: str


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, scenario_reference: dict[str, dict[str, Any]]
) -> Iterator[Cluster]:
    directories = [tmp_path_factory.mktemp(name) for name in ("stack", "prefill", "proxy")]
    with (
        run_stack(directories[0], f"--decode-arg=--registration-deadline-s={DEADLINE_S}") as stack,
        run_node("prefill", directories[1]) as second,
        run_proxy([stack.prefill, second], [stack.decode], directories[2]) as url,
    ):
        yield Cluster(stack, second, url)


@pytest.fixture(autouse=True)
def nothing_left_over(cluster: Cluster) -> Iterator[None]:
    """No KV block is held or in quarantine, a plain request works, and decode was never started again."""
    decode, ranks = cluster.stack.decode.pid, engines(cluster.stack.decode)
    yield
    cluster.stack.wait_idle()
    assert not any(cluster.second.metric("lockstep_kv_cache_usage_ratio").values())
    assert not any(cluster.stack.decode.by_rank(QUARANTINED).values())
    plain_request(cluster.stack)
    cluster.stack.wait_idle()
    assert (cluster.stack.decode.pid, engines(cluster.stack.decode)) == (decode, ranks)


async def test_killed_three_times(cluster: Cluster, scenario_reference: dict[str, dict[str, Any]]) -> None:
    """First before decode has ever spoken to it, then twice in mid-transfer, each time back at its address.

    With another prefill node all requests are answered; without one they end with an error. New ones work.
    """
    for number in range(3):
        bodies = _long_prompts(number)
        old = cluster.stack.prefill
        async with (
            httpx.AsyncClient(base_url=cluster.url, timeout=120) as client,
            httpx.AsyncClient(base_url=cluster.stack.url, timeout=120) as other,
        ):
            alone = asyncio.create_task(
                stream_or_error(other, greedy(3800, seed=1100 + number, max_tokens=8))
            )
            running = [asyncio.create_task(stream_completion(client, body)) for body in bodies]
            await (_computes(old) if number == 0 else _pushes(old))
            assert not all(task.done() for task in running)
            signal_engine(old, signal.SIGKILL)
            await until(lambda old=old: not old.ready(), "the node is not ready", timeout_s=NOTICED_S)
            streams = await asyncio.gather(*running)
            lonely = await asyncio.wait_for(alone, 2 * DEADLINE_S)
        # Nobody else could have computed it.
        assert (lonely.error is None) == (lonely.finish_reason == "length")
        await comes_back(cluster.stack, old)
        async with httpx.AsyncClient(base_url=cluster.stack.url, timeout=60) as client:
            stream = await stream_completion(client, QUEUED[0])
        assert stream.token_ids == scenario_reference["queued-0"]["choices"][0]["token_ids"]
        await _same_as_undisturbed(cluster, bodies, streams)


async def test_frozen_in_mid_transfer(cluster: Cluster) -> None:
    """Its requests are given up and answered by the other node; when it goes on it writes nothing more."""
    old, bodies = cluster.stack.prefill, _long_prompts(3)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
        running = [asyncio.create_task(stream_completion(client, body)) for body in bodies]
        await _pushes(old)
        signal_engine(old, signal.SIGSTOP)
        try:
            assert not all(task.done() for task in running)
            streams = await asyncio.gather(*running)
        finally:
            signal_engine(old, signal.SIGCONT)
        await until(lambda: not any(cluster.stack.decode.metric(QUARANTINED).values()), "no quarantine", 30)
        await until(lambda: cluster.stack.prefill.ready(), "it takes requests again", timeout_s=30)
    await _same_as_undisturbed(cluster, bodies, streams)
    assert cluster.stack.prefill.pid == old.pid


def _long_prompts(number: int) -> list[dict[str, Any]]:
    """New ones each time: decode would have the others in its prefix cache, and nothing would be pushed."""
    return [greedy(3500 + room, seed=1000 + 10 * number + room, max_tokens=8) for room in range(6)]


async def _same_as_undisturbed(cluster: Cluster, bodies: list[dict[str, Any]], streams: list[Stream]) -> None:
    """The answers are those that the same prompts get when nothing happens to them."""
    again = await complete_all(cluster.url, bodies, concurrency=2)
    for stream, answer in zip(streams, again, strict=True):
        assert stream.token_ids == answer["choices"][0]["token_ids"]
        assert (stream.finish_reason, stream.error, len(stream.token_ids)) == ("length", None, 8)


async def _computes(node: Node) -> None:
    await until(lambda: any(node.metric("lockstep_requests_running").values()), "it computes", timeout_s=20)


async def _pushes(node: Node) -> None:
    """Chunks of a prompt that is still being computed have been written."""
    before = node.kv_events("streamed_chunks")
    await until(lambda: node.kv_events("streamed_chunks") > before, "it pushes", timeout_s=20)
