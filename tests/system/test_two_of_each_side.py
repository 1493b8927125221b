"""Workers, hedges, traces and moved streams of a proxy that has two nodes on each side, on real engines."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from component.proxy.otlp_receiver import OtlpReceiver
from system.conftest import ReferenceRun
from system.harness import Node, Stack, run_stack, scrape, wait_until
from system.scenarios.bodies import AT_THE_LIMIT, LONG, QUEUED
from system.servers import run_node, run_proxy
from system.streams import Stream, stream_completion
from system.waiting import until

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

TRACE_ID, CLIENTS_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@dataclass(frozen=True)
class Nodes:
    """Of one stack, with two decode ranks, and one more of each side with one rank."""

    stack: Stack
    prefill: list[Node]
    decode: list[Node]

    def kv_in_use(self) -> bool:
        """On any rank that still serves."""
        running = [node for node in (*self.prefill, *self.decode) if node.ready()]
        return any(any(node.metric("lockstep_kv_cache_usage_ratio").values()) for node in running)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, reference_run: ReferenceRun) -> Iterator[Nodes]:
    directories = [tmp_path_factory.mktemp(name) for name in ("stack", "prefill", "decode")]
    with (
        run_stack(directories[0]) as stack,
        run_node("prefill", directories[1]) as prefill,
        run_node("decode", directories[2]) as decode,
    ):
        yield Nodes(stack, [stack.prefill, prefill], [stack.decode, decode])


@pytest.fixture
def expected(reference_run: ReferenceRun) -> Mapping[str, list[int]]:
    """Plain vLLM's token ids by the name of the request."""
    answers = reference_run.scenarios.items()
    return {name: answer["choices"][0]["token_ids"] for name, answer in answers}


@pytest.fixture(autouse=True)
def nothing_left_over(nodes: Nodes) -> Iterator[None]:
    """No KV block is held on either side."""
    yield
    asyncio.run(until(lambda: not nodes.kv_in_use(), "all KV blocks are free", timeout_s=20))


async def test_two_workers_serve_one_port(
    nodes: Nodes, expected: Mapping[str, list[int]], tmp_path: Path
) -> None:
    """Connections go to both processes, each request's answer is plain vLLM's, and the counts are of both."""

    async def alone(number: int) -> list[int]:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            stream = await stream_completion(client, QUEUED[number % len(QUEUED)])
        return list(stream.token_ids)

    def serving() -> str:
        return str(httpx.get(f"{url}/lockstep/status", timeout=30).json()["proxy"]["worker"])

    with run_proxy(nodes.prefill, nodes.decode, tmp_path, "--workers", "2") as url:
        async with asyncio.timeout(60):
            while {await asyncio.to_thread(serving) for _ in range(8)} != {"1", "2"}:
                pass
        answers = await asyncio.gather(*(alone(number) for number in range(24)))
        total = sum(scrape(url, "lockstep_proxy_requests_total").values())
    assert answers == [expected[f"queued-{number % len(QUEUED)}"] for number in range(24)]
    assert total == 24


async def test_hedged_requests_are_answered_once(
    nodes: Nodes, expected: Mapping[str, list[int]], tmp_path: Path
) -> None:
    """A prompt of 4,000 tokens takes longer than the hedge waits for: whoever is first answers."""
    flags = ("--hedge-after-s", "0.05")
    with run_proxy(nodes.prefill, nodes.decode, tmp_path, *flags) as url:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            for room, body in AT_THE_LIMIT.items():
                stream = await stream_completion(client, body)
                assert (stream.token_ids, stream.done) == (expected[f"limit-{room}"], True)
        hedges = sum(scrape(url, "lockstep_proxy_hedges_total").values())
    assert 0 < hedges <= len(AT_THE_LIMIT)


async def test_a_trace_has_both_legs_and_the_push(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One trace with the client's id; the push begins as prefill ends and ends within decode."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    collector = OtlpReceiver().start()
    try:
        endpoint = f"http://127.0.0.1:{collector.port}"
        with run_proxy(nodes.prefill, nodes.decode, tmp_path, "--otlp-traces-endpoint", endpoint) as url:
            async with httpx.AsyncClient(base_url=url, timeout=120) as client:
                headers = {"traceparent": f"00-{TRACE_ID}-{CLIENTS_SPAN}-01"}
                await stream_completion(client, QUEUED[0], headers=headers)
    finally:
        collector.stop()
    spans = {span.name: span for span in collector.of(TRACE_ID)}
    assert {"POST /v1/completions", "attempt", "queue", "prefill", "kv_push", "decode"} <= set(spans)
    assert spans["POST /v1/completions"].parent_span_id.hex() == CLIENTS_SPAN
    for name in ("prefill", "kv_push", "decode"):
        assert spans[name].parent_span_id == spans["attempt"].span_id
    prefill, push, decode = spans["prefill"], spans["kv_push"], spans["decode"]
    assert prefill.start_time_unix_nano < prefill.end_time_unix_nano <= push.end_time_unix_nano
    assert push.end_time_unix_nano < decode.end_time_unix_nano


async def test_a_drained_node_moves_its_streams(
    nodes: Nodes, expected: Mapping[str, list[int]], tmp_path: Path
) -> None:
    """The last test: one decode node and one prefill node leave under load, and no stream notices."""
    streams = [Stream() for _ in range(6)]
    leaving = [nodes.prefill[1], nodes.decode[1]]
    with run_proxy(nodes.prefill, nodes.decode, tmp_path) as url:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            running = [asyncio.create_task(stream_completion(client, LONG, stream)) for stream in streams]
            await until(
                lambda: min(len(stream.token_ids) for stream in streams) >= 30, "all run", timeout_s=60
            )
            said = await asyncio.to_thread(drain, leaving)
            await asyncio.gather(*running)
            after = await stream_completion(client, QUEUED[0])
        log = (tmp_path / "proxy.log").read_text()
    assert [(stream.token_ids, stream.finish_reason, stream.error) for stream in streams] == 6 * [
        (expected["long"], "length", None)
    ]
    assert after.token_ids == expected["queued-0"]
    assert said.count("drained, it exits") == 2
    assert re.search(r"attempt 1 ended while \w+: drained \(", log)
    for node in leaving:
        assert await asyncio.to_thread(exit_code, node) == 0


def exit_code(node: Node) -> int:
    """Of a node that is about to exit, which is left for its starter to reap."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    wait_until(lambda: os.waitid(os.P_PID, node.pid, flags) is not None, f"{node.role} exits", 60)
    ended = os.waitid(os.P_PID, node.pid, flags)
    assert ended is not None
    return ended.si_status


def drain(leaving: list[Node]) -> str:
    """`lockstep drain --move`; returns what it says."""
    command = [str(Path(sys.executable).with_name("lockstep")), "drain", "--move"]
    command += [node.grpc_address for node in leaving]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
