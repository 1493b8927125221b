"""The proxy's life: connect, wait for the first pair, serve, drain, close."""

import asyncio
import contextlib
import copy
import functools
import logging
import signal
import socket
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from prometheus_client import REGISTRY
from starlette.middleware import Middleware
from uvicorn.config import LOGGING_CONFIG
from vllm import envs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import NoSignalServer
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config

from lockstep import health
from lockstep.errors import UnavailableError
from lockstep.health import NO_TLS
from lockstep.rpc import credentials
from proxy import status, vllm_config
from proxy.admission import entrance
from proxy.admission.entrance import Entrance
from proxy.admission.queue_limits import QueueLimits
from proxy.body_validation import refuse_wrong_types
from proxy.cluster import Cluster
from proxy.config import ProxyConfig
from proxy.discovery import configured
from proxy.discovery.membership import Membership
from proxy.engine_core_client import ClusterClient
from proxy.first_byte import FirstByteGate
from proxy.flow import Flow
from proxy.front_end import FrontEnd
from proxy.ids import ChoiceIds
from proxy.live import admin_port
from proxy.nodes import Node, Role
from proxy.rank_header import RankHeader
from proxy.routing import Ranks, policies
from proxy.security import certificates, exposed
from proxy.security.key_source import KeySource
from proxy.session import NodeSession
from proxy.session_header import SessionHeader
from proxy.succession import FrontEnds
from proxy.tracing.request_span import RequestSpan
from proxy.unserved_routes import add_unserved
from proxy.workers import gauges
from proxy.workers.place import Place

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CLOSE_CONNECTIONS_S = 5
"""What uvicorn gives answers that are being written once all requests have ended."""


def bind(args: Namespace) -> socket.socket:
    """The socket of --host and --port; vLLM's default is every address. Raises ConfigError."""
    return health.bind(args.host or "0.0.0.0", args.port, "--port")


async def serve(config: ProxyConfig, args: Namespace, keys: KeySource, place: Place | None = None) -> None:
    """Run until SIGTERM or SIGINT. Raises ConfigError or UnavailableError when it cannot start.

    `place`: where one of several workers is; it also ends with its supervisor.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    sock = place.socket() if place else bind(args)
    with contextlib.closing(sock), place.supervised(stop.set) if place else contextlib.nullcontext():
        async with (
            sessions(config) as (cluster, client),
            collecting(config, args, client.flow, keys, place) as collector,
        ):
            door = entrance.build(config, args, keys, client.flow)
            alone = place is None or place.answers_health
            async with answering_health(sock, door, exposed.tls(args)) if alone else contextlib.nullcontext():
                pair = await _unless_stopped(stop, first_pair(cluster, client.flow, config.startup_timeout_s))
            if pair is not None:
                begun = place.ready if place else None
                await _serve_pair(config, args, client, collector, pair, door, sock, stop, begun)


@contextlib.asynccontextmanager
async def collecting(
    config: ProxyConfig, args: Namespace, flow: Flow, keys: KeySource, place: Place | None = None
) -> AsyncIterator[status.Collector]:
    """What the status is put together with, and the admin port that shows it from the start."""
    collector = status.Collector(flow, (place.number, place.of) if place else (1, 1))
    if place is not None and config.admin_port is not None:
        config = config.model_copy(update={"admin_port": config.admin_port + place.number - 1})
    async with admin_port.serving(config, flow, collector.document, keys, exposed.tls(args)):
        yield collector


@contextlib.asynccontextmanager
async def answering_health(
    sock: socket.socket, door: Entrance, tls: Mapping[str, Any] = NO_TLS
) -> AsyncIterator[None]:
    """Answer /healthz and /readyz on a copy of the socket, while there is no front end yet.

    The socket goes on listening afterwards: a client that connects meanwhile waits for the front end.
    """
    done = asyncio.Event()
    app = health.build_app(lambda: door.not_ready_because() or "starting the front end", REGISTRY)
    task = asyncio.create_task(health.serve(door.guarded(app), sock.dup(), done, tls=tls), name="health")
    try:
        yield
    finally:
        done.set()
        await task


@contextlib.asynccontextmanager
async def sessions(config: ProxyConfig) -> AsyncIterator[tuple[Cluster, ClusterClient]]:
    """Keep a session to every listed node open.

    Raises ConfigError for credentials that cannot be used, and for a source of nodes that cannot.
    """
    link = credentials.of_caller(config)
    sources = configured.sources(config)
    cluster = Cluster()
    ids = ChoiceIds()
    ranks = Ranks(config.prefill_window_tokens, policies.policy(config.routing_policy))
    flow = Flow(
        cluster,
        ranks,
        config.request_timeout_s,
        config.max_attempts,
        hand_off=config.hand_off == "on",
        queue_limits=QueueLimits(config.max_queued_requests, config.queue_timeout_s),
        frozen_after_s=config.frozen_after_s,
        retry_limits=config.retry_limits(),
        drain_move_s=config.drain_move_s,
    )

    def open_session(address: str, role: Role) -> NodeSession:
        return NodeSession(address, role, ids.proxy_id, config.connect_timeout_s, flow, link)

    with flow.metrics.published(lambda: flow.num_queued, flow.not_ready_because, cluster.count):
        following = Membership(flow, open_session).following(configured.fixed_nodes(config), sources)
        async with flow.suspicion.watching(), following, gauges.written(flow.metrics.write_gauges):
            yield cluster, ClusterClient(flow, ids)


async def first_pair(cluster: Cluster, flow: Flow, deadline_s: float) -> tuple[Node, Node]:
    """Wait for a prefill and a decode node that fit together; raises UnavailableError at the deadline."""
    try:
        async with asyncio.timeout(deadline_s):
            while (pair := cluster.pair()) is None:
                flow.paired.clear()
                await flow.paired.wait()
    except TimeoutError:
        raise UnavailableError(
            f"no prefill and decode node that fit together within {deadline_s:g} s: "
            f"{cluster.not_ready_because()}"
        ) from None
    return pair


async def build(
    given: Namespace,
    collector: status.Collector,
    door: Entrance,
    client: ClusterClient,
    pair: tuple[Node, Node],
) -> tuple[FrontEnd, FastAPI]:
    """vLLM's app over our client, with our health routes, the gate before its answers and the door before it.

    `given` is as the command line has it; what it leaves open is filled in, in a copy, from the nodes.
    """
    args = copy.copy(given)
    front_end = FrontEnd(vllm_config.from_nodes(args, *pair), client, args)
    tasks = await front_end.get_supported_tasks()
    app = build_app(args, tasks, front_end.model_config)
    refuse_wrong_types(app)
    # Innermost, so that vLLM's request metrics count the status that the client gets.
    app.user_middleware += [
        Middleware(RankHeader, num_ranks=lambda: client.flow.num_decode_ranks),
        Middleware(SessionHeader),
        Middleware(FirstByteGate),
    ]
    # Of strangers nothing is traced: what the door refuses has no span.
    traced = [Middleware(RequestSpan)] if args.otlp_traces_endpoint is not None else []
    app.user_middleware[:0] = [*door.middleware(), *traced]
    # vLLM's SageMaker bootstrap has built the stack already; Starlette builds it anew at the first call.
    app.middleware_stack = None
    _add_health(app, door)
    collector.begin(status.Served(args.served_model_name, front_end.model_config.max_model_len))
    status.add_route(app, collector.document)
    add_unserved(app)
    await init_app_state(front_end, app.state, args, tasks)
    return front_end, app


def _add_health(app: FastAPI, door: Entrance) -> None:
    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> JSONResponse:
        return JSONResponse({"status": "alive"})

    @app.get("/readyz", include_in_schema=False)
    async def readyz() -> JSONResponse:
        reason = door.not_ready_because()
        if reason:
            return JSONResponse({"status": "not ready", "reason": reason}, status_code=503)
        return JSONResponse({"status": "ready"})


async def _serve_pair(
    config: ProxyConfig,
    args: Namespace,
    client: ClusterClient,
    collector: status.Collector,
    pair: tuple[Node, Node],
    door: Entrance,
    sock: socket.socket,
    stop: asyncio.Event,
    begun: Callable[[], None] | None = None,
) -> None:
    front_ends = FrontEnds(functools.partial(build, args, collector, door), client)
    async with front_ends.serving(pair):
        server = http_server(front_ends, args, door)
        serving = asyncio.create_task(server.serve(sockets=[sock]), name="http")
        host, port = sock.getsockname()[:2]
        logger.info("listening on %s:%d", host, port)
        if begun is not None:
            begun()
        try:
            with certificates.refreshed(server.config, args):
                await _unless_stopped(stop, _ended(serving))
            logger.info("draining for at most %g s", config.drain_timeout_s)
            await client.flow.drain(config.drain_timeout_s)
        finally:
            server.should_exit = True
            await serving


def http_server(app: FrontEnds, args: Namespace, door: Entrance) -> uvicorn.Server:
    """uvicorn with vLLM's settings (launchers/api_server/entry.py::build_and_serve), signals left to us."""
    log_config = get_uvicorn_log_config(args)
    uvicorn_config = uvicorn.Config(
        app,
        log_config=log_config if log_config is not None else LOGGING_CONFIG,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        timeout_graceful_shutdown=_CLOSE_CONNECTIONS_S,
        http=door.http_protocol(),
        ws="none",
        **exposed.tls(args),
        lifespan="off",  # each front end has its own
    )
    server: uvicorn.Server = NoSignalServer(uvicorn_config)
    app.answer_through(server)
    return server


async def _ended(task: asyncio.Task[None]) -> None:
    """Wait for a task without owning it: cancelling this does not cancel the task."""
    await asyncio.wait((task,))


async def _unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None when the process was told to stop first; `work` is then cancelled."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
