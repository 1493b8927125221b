"""Nodes that join and leave while the proxy runs, by the file of the nodes and by a name."""

import asyncio
from pathlib import Path
from typing import Any

from component.proxy.conftest import Start
from component.proxy.fake_node import FakeNode, Wire
from component.proxy.stack import PICO, until

from proxy import arguments, server

ASK: dict[str, Any] = {"model": "pico", "prompt": "Some words, and some more of them.", "max_tokens": 8}
OFTEN = ("--discovery-interval-s", "0.02")


def _nodes(wire: Wire) -> tuple[FakeNode, FakeNode, FakeNode]:
    return FakeNode("prefill", wire, PICO), FakeNode("decode", wire, PICO), FakeNode("decode", wire, PICO)


def listing(*nodes: FakeNode) -> str:
    return "".join(f"{node.role} {node.address}\n" for node in nodes)


async def test_nodes_of_the_file_join_and_leave(start: Start, tmp_path: Path) -> None:
    """A stream on a node that is taken out of the file goes on to its end there; nothing new goes there."""
    path, wire = tmp_path / "nodes", Wire()
    prefill, first, second = _nodes(wire)
    await second.start()
    path.write_text("")
    stack = await start("--nodes-file", str(path), *OFTEN, prefill=[prefill], decode=[first])
    path.write_text(listing(second))
    await until(lambda: len(stack.cluster.live("decode")) == 2, "it joins")
    second.set.pause_after_tokens = 4
    asked = stack.http.post("/v1/completions", json=ASK, headers={"X-data-parallel-rank": "1"})
    answer = asyncio.create_task(asked)
    await until(lambda: second.num_paused, "a stream runs on it")
    path.write_text("# nobody")
    await until(lambda: len(stack.cluster.live("decode")) == 1, "it leaves")
    for _ in range(3):
        assert (await stack.http.post("/v1/completions", json=ASK)).status_code == 200
    assert len(second.sessions) == 1
    second.set.go.set()
    assert (await answer).json()["usage"]["completion_tokens"] == 8
    await until(lambda: not second.sessions, "its session is closed")
    assert (len(first.legs), len(second.legs), second.aborted) == (3, 1, [])
    assert len(stack.cluster.listed()) == 2
    await second.stop()


async def test_node_that_left_and_dies(start: Start, tmp_path: Path) -> None:
    """The stream that it had goes on on another one, as after any death."""
    path, wire = tmp_path / "nodes", Wire()
    prefill, first, second = _nodes(wire)
    await second.start()
    path.write_text(listing(second))
    stack = await start("--nodes-file", str(path), *OFTEN, prefill=[prefill], decode=[first])
    await until(lambda: len(stack.cluster.live("decode")) == 2, "both are there")
    second.set.pause_after_tokens = 4
    first.set.pause_after_tokens = 2
    answers = [asyncio.create_task(stack.http.post("/v1/completions", json=ASK)) for _ in range(2)]
    await until(lambda: first.num_paused and second.num_paused, "a stream runs on each")
    first.set.pause_after_tokens = None
    first.set.go.set()
    path.write_text("")
    await until(lambda: len(stack.cluster.live("decode")) == 1, "it leaves")
    await second.stop()
    for answer in answers:
        assert (await answer).json()["usage"]["completion_tokens"] == 8
    assert [len(leg.carried) > 0 for leg in first.legs] == [False, True]


async def test_each_address_of_a_name_is_connected_to(tmp_path: Path) -> None:
    """By the system's resolver. Named by a file as well, it is one node still."""
    wire = Wire()
    prefill, decode = FakeNode("prefill", wire, PICO), FakeNode("decode", wire, PICO)
    for node in (prefill, decode):
        await node.start()
    path = tmp_path / "nodes"
    path.write_text(listing(decode))
    config, _ = arguments.load(
        [
            *("--prefill-dns", f"localhost:{prefill.port}", "--decode-dns", f"localhost:{decode.port}"),
            *("--nodes-file", str(path), *OFTEN),
        ]
    )
    async with server.sessions(config) as (cluster, client):
        await until(lambda: not client.flow.not_ready_because(), "the pair is found")
        assert {entry.address for entry in cluster.listed()} == {prefill.address, decode.address}
        path.write_text(f"decode localhost:{decode.port}")
        await until(lambda: len(cluster.listed()) == 3, "the second address of the node is listed")
        await until(lambda: cluster.listed()[-1].reason.startswith("the same node as"), "it is told")
        assert len(cluster.live("decode")) == 1
    for node in (prefill, decode):
        await node.stop()
