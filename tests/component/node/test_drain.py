"""Draining a node over the wire, by the command: what it tells, what it waits for, what it gives back."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc.aio
import pytest
from component.node.test_server import DEADLINE_S, HELLO, Running, State, add, finish, until

from lockstep.cli.drain import drain_nodes
from lockstep.errors import ConfigError
from lockstep.health import bind
from lockstep.node.drain import Drain, WaitsFor
from lockstep.node.server import NodeService, start_server
from lockstep.node.sessions import SessionRegistry
from lockstep.rpc.channel import connect
from prefill_node.service import ROLE


class Node(Running):
    """A node's server, and the part of its life that follows the wish to drain."""

    address = ""
    waits_for: WaitsFor = staticmethod(lambda since_s: "")

    async def live(self) -> None:
        """As lockstep.node.runtime does."""
        drain = self.state.drain
        await drain.requested.wait()
        self.state.ready, self.state.draining = False, True
        engines = asyncio.create_task(asyncio.Event().wait())
        await drain.run(engines, lambda since_s: self.waits_for(since_s))  # type: ignore[arg-type]
        engines.cancel()


@contextlib.asynccontextmanager
async def running(timeout_s: float) -> AsyncIterator[Node]:
    state, registry = State(), SessionRegistry()
    state.drain = Drain(timeout_s, registry)
    with bind("127.0.0.1", 0, "--port") as free:
        port = free.getsockname()[1]
    server: grpc.aio.Server
    server, _ = await start_server(NodeService(ROLE, state, registry), "127.0.0.1", port)
    async with connect(f"127.0.0.1:{port}") as channel:
        node = Node(state, registry, channel)
        node.address = f"127.0.0.1:{port}"
        life = asyncio.create_task(node.live())
        yield node
        life.cancel()
    await server.stop(grace=0)


def command(node: Node, said: list[str], timeout_s: float | None = None) -> "asyncio.Task[bool]":
    """`lockstep drain` with the node's address, as it runs in a process of its own."""
    return asyncio.create_task(asyncio.to_thread(drain_nodes, [node.address], timeout_s, said.append))


async def test_running_requests_end_and_nothing_new_is_taken() -> None:
    """The proxies are told, the command says what is waited for, and then that it is done."""
    said: list[str] = []
    async with running(20.0) as node, node.session() as call:
        await call.write(add("a"))
        await until(lambda: node.registry.num_requests == 1)
        drained = command(node, said)
        assert (await call.read()).WhichOneof("frame") == "draining"
        await until(lambda: bool(said))
        assert said[0] == f"{node.address}: waits for 1 request(s), 20 s at most"
        await call.write(add("b"))
        assert (await call.read()).error.code == "DrainingError"
        other = node.stub.Session(timeout=DEADLINE_S)
        await other.write(HELLO)
        assert await other.code() == grpc.StatusCode.UNAVAILABLE
        finish(node, "a")
        assert await drained
    assert said[-1] == f"{node.address}: drained, it exits"


async def test_what_does_not_end_in_time_is_given_back() -> None:
    """With the time of the command in place of the node's: the proxy is told to try it elsewhere."""
    said: list[str] = []
    async with running(3600.0) as node, node.session() as call:
        await call.write(add("a"))
        await until(lambda: node.registry.num_requests == 1)
        drained = command(node, said, timeout_s=0.1)
        assert (await call.read()).draining.deadline_s == pytest.approx(0.1, abs=0.09)
        frame = await call.read()
        assert (frame.error.request_id, frame.error.code) == ("a", "NodeLostError")
        assert await drained
    assert said[-1] == f"{node.address}: drained, it exits; 1 request(s) go on elsewhere"


async def test_second_wish_shortens_the_first() -> None:
    """Someone in a hurry need not wait for the deadline that was given before."""
    said: list[str] = []
    async with running(3600.0) as node, node.session() as call:
        await call.write(add("a"))
        await until(lambda: node.registry.num_requests == 1)
        first = command(node, said)
        await until(lambda: bool(said))
        assert await command(node, said, timeout_s=0)
        assert await first


async def test_proxies_are_told_to_move_what_runs() -> None:
    """With --move; and anew when a later wish says so, or has another deadline."""
    said: list[str] = []
    async with running(3600.0) as node, node.session() as call:
        await call.write(add("a"))
        await until(lambda: node.registry.num_requests == 1)
        first = command(node, said)
        told = (await call.read()).draining
        assert (told.move, told.deadline_s) == (False, pytest.approx(3600, abs=60))
        second = asyncio.create_task(asyncio.to_thread(drain_nodes, [node.address], None, print, move=True))
        told = (await call.read()).draining
        assert (told.move, told.deadline_s) == (True, pytest.approx(3600, abs=60))
        third = command(node, said, timeout_s=60)
        told = (await call.read()).draining
        assert (told.move, told.deadline_s) == (True, pytest.approx(60, abs=30))
        finish(node, "a")
        assert all([await first, await second, await third])


async def test_waits_for_what_no_request_shows() -> None:
    """Pushes of a prefill node, or steps that other nodes of its group need; asked with the time since."""
    said: list[str] = []
    async with running(20.0) as node:
        asked: list[float] = []

        def waits_for(since_s: float) -> str:
            asked.append(since_s)
            return "pushes of KV"

        node.waits_for = waits_for  # type: ignore[method-assign]
        drained = command(node, said)
        await until(lambda: any("waits for pushes of KV" in line for line in said))
        assert asked[-1] == node.registry.empty_since_s
        node.waits_for = staticmethod(lambda since_s: "")  # type: ignore[method-assign]
        assert await drained


async def test_node_that_dies_while_it_drains() -> None:
    """The command does not say that it drained."""
    said: list[str] = []
    async with running(20.0) as node, node.session() as call:
        await call.write(add("a"))
        await until(lambda: node.registry.num_requests == 1)
        drained = command(node, said)
        await until(lambda: bool(said))
    assert not await drained
    assert "it is gone before it had drained" in said[-1]


async def test_nobody_there(unused_tcp_port: int) -> None:
    """Said with the reason."""
    said: list[str] = []
    assert not await asyncio.to_thread(drain_nodes, [f"127.0.0.1:{unused_tcp_port}"], None, said.append)
    assert "not drained: unavailable" in said[0]


@pytest.mark.parametrize("node", ["http://node:50080", "node", "node:1/x"])
def test_address_that_is_none(node: str) -> None:
    """The HTTP port of a node is another one."""
    with pytest.raises(ConfigError, match="give a node's gRPC address"):
        drain_nodes([node], None, print)
