"""Runs the real proxy app on a real socket, over fake nodes."""

import asyncio
import contextlib
import functools
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from component.proxy.fake_node import FakeNode

from proxy import arguments, server
from proxy.admission import entrance
from proxy.cluster import Cluster
from proxy.engine_core_client import ClusterClient
from proxy.front_end import FrontEnd
from proxy.security import key_source
from proxy.succession import FrontEnds

PICO = str(Path(__file__).parents[3] / "models" / "pico")
DEADLINE_S = 20.0


@dataclass
class Stack:
    """A running proxy and its nodes."""

    prefill: list[FakeNode]
    decode: list[FakeNode]
    cluster: Cluster
    client: ClusterClient
    front_ends: FrontEnds
    http: httpx.AsyncClient

    @property
    def front_end(self) -> FrontEnd:
        return self.front_ends.current

    def prefill_leg(self, node: int = 0, leg: int = -1):
        return self.prefill[node].legs[leg].request

    def decode_leg(self, node: int = 0, leg: int = -1):
        return self.decode[node].legs[leg].request


async def until(condition: Callable[[], object], what: str) -> None:
    """Poll with a deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - what it waits for is in another process or server
            await asyncio.sleep(0.005)
    assert condition(), what


@contextlib.asynccontextmanager
async def running(
    prefill: list[FakeNode], decode: list[FakeNode], flags: list[str], send_buffer_bytes: int | None = None
) -> AsyncIterator[Stack]:
    """Start the proxy as `python -m proxy` does, on a free port.

    `send_buffer_bytes`: what the kernel takes of each answer that is not read.
    """
    argv = [
        *("--prefill", ",".join(node.address for node in prefill)),
        *("--decode", ",".join(node.address for node in decode)),
        *("--served-model-name", "pico"),
        "--disable-uvicorn-access-log",
        *flags,
    ]
    config, args = arguments.load(argv)
    keys = key_source.take(config, args)
    sock = socket.create_server(("127.0.0.1", 0))
    if send_buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    port = sock.getsockname()[1]
    scheme = "https" if args.ssl_certfile else "http"
    async with (
        server.sessions(config) as (cluster, client),
        server.collecting(config, args, client.flow, keys) as collector,
    ):
        pair = await server.first_pair(cluster, client.flow, DEADLINE_S)
        door = entrance.build(config, args, keys, client.flow)
        front_ends = FrontEnds(functools.partial(server.build, args, collector, door), client)
        async with front_ends.serving(pair):
            http_server = server.http_server(front_ends, args, door)
            serving = asyncio.create_task(http_server.serve(sockets=[sock]))
            await until(lambda: http_server.started, "the HTTP server starts")
            async with httpx.AsyncClient(
                base_url=f"{scheme}://127.0.0.1:{port}", timeout=DEADLINE_S, verify=False
            ) as http:
                yield Stack(prefill, decode, cluster, client, front_ends, http)
            await client.flow.drain(0)
            http_server.should_exit = True
            await serving


def refusals(stack: Stack) -> dict[str, float]:
    """What the proxy has turned away so far, by why; reasons that did not occur are left out."""
    (family,) = stack.client.flow.metrics.refusals.collect()
    counted = {s.labels["reason"]: s.value for s in family.samples if s.name.endswith("_total")}
    return {reason: count for reason, count in counted.items() if count}


async def events(stack: Stack, path: str, body: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    """Send a streaming request and return the status and the events, without the final [DONE]."""
    async with stack.http.stream("POST", path, json=body) as answer:
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
    if answer.status_code == 200:
        assert lines.pop() == "data: [DONE]"
    return answer.status_code, [json.loads(line.removeprefix("data: ")) for line in lines]


async def completion_events(stack: Stack, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The events of a streamed completion as they come, without the final [DONE]."""
    async with stack.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))
