"""A rank that has work and makes no step, and a node that takes the other nodes of its group with it."""

import asyncio
from typing import Any

from component.proxy.conftest import Start
from component.proxy.fake_node import FakeNode, Wire
from component.proxy.stack import PICO, Stack, until

from lockstep.rpc.generated import lockstep_pb2 as pb

ASK: dict[str, Any] = {"model": "pico", "prompt": "Some words, and some more of them.", "max_tokens": 8}
FROZEN_AFTER_S = 0.4
FLAGS = ("--frozen-after-s", str(FROZEN_AFTER_S))


def half(wire: Wire, rank: int) -> FakeNode:
    """One of the two hosts of a decode group, with one rank."""
    ranks = [
        pb.RankDescription(
            global_rank=rank, engine_id=f"half_dp{rank}", max_num_seqs=8, max_num_batched_tokens=64
        )
    ]
    return FakeNode(
        "decode", wire, PICO, ranks=ranks, group_id="both", engine=pb.EngineSettings(data_parallel_size=2)
    )


async def all_up(stack: Stack, number: int) -> None:
    await until(lambda: len(stack.cluster.live("decode")) == number, "all decode nodes are up")


def ask(stack: Stack) -> "asyncio.Task[Any]":
    return asyncio.create_task(stack.http.post("/v1/completions", json=ASK))


async def stream_on_each(
    start: Start, *flags: str
) -> tuple[Stack, list[FakeNode], FakeNode, list["asyncio.Task[Any]"]]:
    """A group of two hosts, whose streams stand still; a node whose stream goes on; the three answers."""
    wire = Wire()
    halves, other = [half(wire, 0), half(wire, 1)], FakeNode("decode", wire, PICO)
    stack = await start(*flags, prefill=[FakeNode("prefill", wire, PICO)], decode=[*halves, other])
    await all_up(stack, 3)
    for node in (*halves, other):
        node.set.pause_after_tokens = 2
    answers = [ask(stack) for _ in range(3)]
    await until(lambda: all(node.num_paused == 1 for node in (*halves, other)), "a stream runs on each")
    other.set.pause_after_tokens = None
    other.set.go.set()
    return stack, halves, other, answers


async def test_streams_leave_a_frozen_group(start: Start) -> None:
    """One rank stands still: streams of both hosts go on elsewhere within seconds, nothing new goes there.

    It steps again, and is used again.
    """
    stack, halves, other, answers = await stream_on_each(start, *FLAGS)
    assert {(await answer).json()["usage"]["completion_tokens"] for answer in answers} == {8}
    assert len(other.legs) == 3
    assert {len(node.aborted) for node in halves} == {1}
    states = {entry.address: entry.reason for entry in stack.cluster.listed()}
    assert [states[node.address] for node in halves] == ["suspect: it has work and makes no step"] * 2
    assert (await ask(stack)).status_code == 200
    assert len(other.legs) == 4
    for node in halves:
        node.set.pause_after_tokens = None
        for frames in node.sessions:
            frames.put_nowait(pb.NodeFrame(load=pb.RankLoad(rank=0)))
    await all_up(stack, 3)


async def test_last_group_is_waited_for(start: Start) -> None:
    """With nowhere else to go a stream stays, and requests are still taken: it may only be slow."""
    stack = await start(*FLAGS)
    decode = stack.decode[0]
    decode.set.pause_after_tokens = 2
    answer = ask(stack)
    await until(lambda: stack.cluster.listed()[1].state == "aside", "it is suspect")
    shown = (await stack.http.get("/metrics")).text
    assert 'lockstep_proxy_nodes{role="decode",state="suspect"} 1.0' in shown
    assert 'lockstep_proxy_nodes{role="prefill",state="live"} 1.0' in shown
    assert (await stack.http.get("/readyz")).status_code == 200
    assert not answer.done()
    decode.set.go.set()
    assert (await answer).json()["usage"]["completion_tokens"] == 8
    await until(lambda: stack.cluster.listed()[1].state == "live", "it is trusted again")
    assert decode.aborted == []


async def test_one_host_that_dies_takes_its_group_with_it(start: Start) -> None:
    """The streams of the host that is left move at once: its collectives wait for the dead one for ever."""
    stack, halves, _, answers = await stream_on_each(start)
    await halves[1].stop()
    assert {(await answer).json()["usage"]["completion_tokens"] for answer in answers} == {8}
    assert len(halves[0].aborted) == 1
    await until(lambda: len(stack.cluster.live("decode")) == 1, "the group is not used")
    await halves[1].start()
    await all_up(stack, 3)


async def test_not_ready_while_a_host_of_the_only_group_is_missing(start: Start) -> None:
    """Half a group serves nobody."""
    wire = Wire()
    halves = [half(wire, 0), half(wire, 1)]
    stack = await start(prefill=[FakeNode("prefill", wire, PICO)], decode=halves)
    await halves[1].stop()
    await until(lambda: stack.client.flow.not_ready_because(), "the proxy notices")
    answer = await stack.http.get("/readyz")
    assert "rank 1 of its group not connected" in answer.json()["reason"]
    assert (await ask(stack)).status_code == 503
