"""Owns the front ends: one answers, and passes on to another one when the nodes turn to another model."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from lockstep.errors import ConfigError
from proxy.engine_core_client import ClusterClient
from proxy.front_end import FrontEnd
from proxy.nodes import Node
from proxy.served import Served

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_RETRY_S = 5.0

Build = Callable[[ClusterClient, tuple[Node, Node]], Awaitable[tuple[FrontEnd, FastAPI]]]
"""Makes a front end for what a pair of nodes serves. Raises ConfigError without its files."""


@dataclass(slots=True, eq=False)
class _Running:
    client: ClusterClient
    front_end: FrontEnd
    app: FastAPI
    lifespan: contextlib.AsyncExitStack

    async def close(self) -> None:
        await self.lifespan.aclose()
        self.front_end.shutdown()


class FrontEnds:
    """An ASGI application: that of the front end that answers now.

    Requests stay with the front end that began them, whatever nodes of theirs are left; the one that was
    succeeded is closed when they have ended.
    """

    def __init__(self, build: Build, client: ClusterClient) -> None:
        self._build = build
        self._first = client
        self._flow = client.flow
        self._running: list[_Running] = []
        """In the order of their beginning; the last one answers."""
        self._server: uvicorn.Server | None = None

    @property
    def current(self) -> FrontEnd:
        """The one that answers."""
        return self._running[-1].front_end

    def all(self) -> list[FrontEnd]:
        """Those that have requests; the last one answers."""
        return [running.front_end for running in self._running]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._running[-1].app(scope, receive, send)

    def answer_through(self, server: uvicorn.Server) -> None:
        """vLLM's handlers of errors look for the server in the state of the application."""
        self._server = server
        for running in self._running:
            running.app.state.server = server

    @contextlib.asynccontextmanager
    async def serving(self, pair: tuple[Node, Node]) -> AsyncIterator[None]:
        """Begin with the front end of this pair, and follow what the nodes serve."""
        await self._begin(self._first, pair)
        following = asyncio.create_task(self._follow(), name="front ends")
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            for running in self._running:
                await running.close()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            for running in self._running[:-1]:
                if not any(flight.outlet is running.client.outlet for flight in self._flow.in_flight()):
                    self._running.remove(running)
                    await running.close()
            pair = self._flow.cluster.successor()
            if pair is None:
                continue
            try:
                await self._begin(self._first.for_another(), pair)
            except ConfigError as error:
                logger.error("cannot serve what the nodes turned to: %s", error)
                await asyncio.sleep(_RETRY_S)

    async def _begin(self, client: ClusterClient, pair: tuple[Node, Node]) -> None:
        """Build a front end and let it answer. It takes a second or two, in which nothing else is done."""
        served = client.outlet.served = Served.by(*pair)
        front_end, app = await self._build(client, pair)
        lifespan = contextlib.AsyncExitStack()
        await lifespan.enter_async_context(app.router.lifespan_context(app))
        if self._server is not None:
            app.state.server = self._server
        self._running.append(_Running(client, front_end, app, lifespan))
        self._flow.succeed(served)
        logger.info("serving %s", ",".join(app.state.args.served_model_name))
