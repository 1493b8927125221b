"""The small HTTP port of a node: /healthz (alive), /readyz (takes requests), /metrics (Prometheus)."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.types import ASGIApp

from lockstep.errors import ConfigError

NO_TLS: Mapping[str, Any] = MappingProxyType({})

Readiness = Callable[[], str]
"""Returns why the service is not ready, or an empty string when it is."""


def build_app(not_ready_because: Readiness, registry: CollectorRegistry) -> FastAPI:
    """Liveness never touches the engine, readiness does (docs/architecture.md)."""
    app = FastAPI(openapi_url=None)

    @app.get("/healthz")
    async def healthz() -> JSONResponse:
        return JSONResponse({"status": "alive"})

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        reason = not_ready_because()
        if reason:
            return JSONResponse({"status": "not ready", "reason": reason}, status_code=503)
        return JSONResponse({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app


def bind(host: str, port: int, flag: str) -> socket.socket:
    """Take a TCP port, or raise ConfigError naming the flag whose value is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"{flag}: cannot listen on {host}:{port}: {error.strerror}; give a free port"
        ) from error
    return sock


class _Server(uvicorn.Server):
    """Leaves the signals to the service that embeds it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    app: ASGIApp,
    sock: socket.socket,
    stop: asyncio.Event,
    close_connections_s: int | None = None,
    tls: Mapping[str, Any] = NO_TLS,
) -> None:
    """Serve until `stop` is set, and then until all answers have ended, for `close_connections_s` at most.

    `tls` is uvicorn's ssl_ settings.
    """
    server = _Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=close_connections_s,
            **tls,
        )
    )
    task = asyncio.create_task(server.serve(sockets=[sock]))
    await stop.wait()
    server.should_exit = True
    await task
