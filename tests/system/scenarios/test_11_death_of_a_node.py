"""Scenario 11, and what attempts need of 10: a decode rank or a prefill node is killed under its requests."""

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from system.harness import Node, Stack, run_stack
from system.kv_checks import plain_request
from system.processes import comes_back, signal_engine
from system.scenarios.bodies import AT_THE_LIMIT, LONG, QUEUED
from system.servers import run_node, run_proxy
from system.streams import Stream, stream_completion
from system.waiting import until

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

NOTICED_S = 5.0
"""A dead engine shows on the node's readiness and in its requests' streams within this."""


@dataclass(frozen=True)
class Cluster:
    """A stack, and beside it one decode node of one rank and one prefill node, which only `url` knows too."""

    stack: Stack
    second_prefill: Node
    second_decode: Node
    url: str

    async def comes_back(self, old: Node) -> None:
        """Also for the proxy at `url`, which looks for it by itself."""
        await comes_back(self.stack, old)
        await until(self._all_live, "the second proxy has all nodes", timeout_s=30)

    def _all_live(self) -> bool:
        nodes = httpx.get(f"{self.url}/lockstep/status", timeout=10).json()["nodes"]
        return [node["state"] for node in nodes] == 4 * ["live"]


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, scenario_reference: dict[str, dict[str, Any]]
) -> Iterator[Cluster]:
    directories = [tmp_path_factory.mktemp(name) for name in ("stack", "prefill", "decode", "proxy")]
    with (
        run_stack(directories[0]) as stack,
        run_node("prefill", directories[1]) as second_prefill,
        run_node("decode", directories[2]) as second_decode,
        run_proxy([stack.prefill, second_prefill], [stack.decode, second_decode], directories[3]) as url,
    ):
        yield Cluster(stack, second_prefill, second_decode, url)


@pytest.fixture(autouse=True)
def nothing_left_over(cluster: Cluster) -> Iterator[None]:
    """Whatever was killed is back at the end, no KV block is held anywhere, and a plain request works.

    Counts begin anew with a process, so that bytes moved is left to the tests.
    """
    yield
    cluster.stack.wait_idle()
    for node in (cluster.second_prefill, cluster.second_decode):
        assert not any(node.metric("lockstep_kv_cache_usage_ratio").values())
    plain_request(cluster.stack)
    cluster.stack.wait_idle()


async def test_streams_go_on_at_the_other_node(
    cluster: Cluster, scenario_reference: dict[str, dict[str, Any]]
) -> None:
    """One engine of the group is killed: the streams of both its ranks go on at the other node, unbroken.

    Through the proxy that has no other decode node, a stream ends with an error event and without a finish.
    The node is not ready within seconds, its group is started again, and takes requests on both ranks.
    """
    streams, lonely = [Stream() for _ in range(6)], Stream()
    old = cluster.stack.decode
    async with (
        httpx.AsyncClient(base_url=cluster.url, timeout=120) as client,
        httpx.AsyncClient(base_url=cluster.stack.url, timeout=120) as other,
    ):
        running = [
            asyncio.create_task(stream_completion(client, LONG, stream, {"X-Request-Id": f"six-{number}"}))
            for number, stream in enumerate(streams)
        ]
        alone = asyncio.create_task(stream_completion(other, LONG, lonely))
        await until(
            lambda: min(len(stream.token_ids) for stream in [*streams, lonely]) >= 30,
            "all streams run",
            timeout_s=60,
        )
        assert max(len(stream.token_ids) for stream in streams) < 600
        signal_engine(old, signal.SIGKILL, "DP1")
        await until(lambda: not old.ready(), "the node is not ready", timeout_s=NOTICED_S)
        await asyncio.wait_for(alone, NOTICED_S)
        await asyncio.gather(*running)
    expected = scenario_reference["long"]["choices"][0]
    assert lonely.error is not None
    assert lonely.finish_reason is None
    assert lonely.token_ids == expected["token_ids"][: len(lonely.token_ids)]
    assert [(stream.finish_reason, stream.error, stream.done) for stream in streams] == 6 * [
        ("length", None, True)
    ]
    for stream in streams:
        assert (stream.token_ids, stream.text) == (expected["token_ids"], expected["text"])
        assert stream.usage is not None
        assert stream.usage["completion_tokens"] == len(expected["token_ids"])
    await cluster.comes_back(old)
    for rank in ("0", "1"):
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
            stream = await stream_completion(client, QUEUED[0], headers={"X-data-parallel-rank": rank})
        assert stream.token_ids == scenario_reference["queued-0"]["choices"][0]["token_ids"]


async def test_prompts_go_to_the_other_prefill_node(
    cluster: Cluster, scenario_reference: dict[str, dict[str, Any]]
) -> None:
    """A prefill node is killed while it computes long prompts: all of them are answered, by the other one."""
    old = cluster.stack.prefill
    moved_before = sum(cluster.second_prefill.by_rank("lockstep_kv_pushed_bytes_total").values())
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
        running = {
            room: asyncio.create_task(stream_completion(client, AT_THE_LIMIT[room])) for room in AT_THE_LIMIT
        }
        await until(
            lambda: any(old.metric("lockstep_requests_running").values()), "it computes", timeout_s=20
        )
        assert not all(task.done() for task in running.values())
        signal_engine(old, signal.SIGKILL)
        await until(lambda: not old.ready(), "the node is not ready", timeout_s=NOTICED_S)
        streams = {room: await task for room, task in running.items()}
    for room, stream in streams.items():
        expected = scenario_reference[f"limit-{room}"]["choices"][0]
        assert (stream.token_ids, stream.finish_reason) == (expected["token_ids"], "length")
    await cluster.comes_back(old)
    assert sum(cluster.second_prefill.by_rank("lockstep_kv_pushed_bytes_total").values()) > moved_before
