"""A proxy with an admin port over fake nodes that tell steps, and a reader of its events."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
from component.proxy.conftest import Start
from component.proxy.fake_node import FakeNode
from component.proxy.stack import Stack

from lockstep.rpc.generated import lockstep_pb2 as pb

DEADLINE_S = 20.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def step(number: int, mode: str = "FULL", cause: str = "", *, idle: bool = False) -> pb.StepRecord:
    """One row of 1 + K = 3 tokens, in a graph of 6."""
    return pb.StepRecord(
        step=number, mode=mode, width=3, rows=1, tokens=3, padded_tokens=6, dummy=idle, cause=cause
    )


def tell_steps(node: FakeNode, rank: int, *records: pb.StepRecord) -> None:
    """As a node does once a second, to all of its proxies."""
    for frames in node.sessions:
        frames.put_nowait(pb.NodeFrame(records=pb.StepRecords(rank=rank, records=records)))


@dataclass(frozen=True)
class Live:
    """A proxy with a live page."""

    stack: Stack
    url: str

    @property
    def decode(self) -> FakeNode:
        return self.stack.decode[0]

    @contextlib.asynccontextmanager
    async def events(self) -> AsyncIterator["Events"]:
        """Open the page's stream."""
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=DEADLINE_S) as http,
            http.stream("GET", "/lockstep/events") as answer,
        ):
            yield Events(answer)


class Events:
    """Reads server-sent events."""

    def __init__(self, answer: httpx.Response) -> None:
        self.answer = answer
        self._lines = answer.aiter_lines()

    async def next(self, *names: str) -> Any:
        """The data of the next event of these names."""
        async with asyncio.timeout(DEADLINE_S):
            name = ""
            async for line in self._lines:
                field, _, value = line.partition(": ")
                if field == "event":
                    name = value
                elif field == "data" and name in names:
                    return json.loads(value)
        raise AssertionError(f"the stream ended without {names}")


async def live_stack(start: Start, *flags: str) -> Live:
    port = free_port()
    stack = await start("--admin-port", str(port), *flags)
    return Live(stack, f"http://127.0.0.1:{port}")
