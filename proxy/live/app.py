"""The HTTP app of the admin port: the live page, its events, the status document, and the metrics."""

import ipaddress
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from starlette.middleware import Middleware
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from lockstep.errors import UnavailableError
from lockstep.exposure import is_loopback
from proxy import status
from proxy.live.event_stream import EventStream
from proxy.live.feed import Feed

PAGE_PATH = "/lockstep/"
EVENTS_PATH = "/lockstep/events"
STATIC = Path(__file__).parent / "static"

_HEADERS = (
    # The page is whole in itself: a browser that keeps to this asks nobody else for anything.
    (b"content-security-policy", b"default-src 'self'; base-uri 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)


def build_app(feed: Feed, host: str) -> FastAPI:
    """`host` is the address that the port listens on."""
    app = FastAPI(openapi_url=None, middleware=[Middleware(_Guard, only_local_names=is_loopback(host))])

    @app.get("/")
    async def root() -> Response:
        return RedirectResponse(PAGE_PATH)

    status.add_route(app, feed.status)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)

    @app.get(EVENTS_PATH)
    async def events() -> Response:
        try:
            return EventStream(feed, feed.open())
        except UnavailableError as error:
            return JSONResponse({"error": str(error)}, status_code=503, headers={"Retry-After": "10"})

    app.mount(PAGE_PATH, StaticFiles(directory=STATIC, html=True))
    return app


class _Guard:
    """Sets the headers that keep the page to itself, and refuses names that a loopback port cannot have.

    A web page elsewhere can make its own name point to 127.0.0.1 and have the browser read from there as its
    own; the name then stands in the Host header.
    """

    def __init__(self, app: ASGIApp, only_local_names: bool) -> None:
        self._app = app
        self._only_local_names = only_local_names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._only_local_names and not _is_local_name(dict(scope["headers"]).get(b"host", b"")):
            refusal = PlainTextResponse("This port is asked for by address or as localhost.", 421)
            await refusal(scope, receive, send)
            return

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _is_local_name(host: bytes) -> bool:
    """An address of whatever machine, or localhost, with or without a port."""
    name = host.decode("latin-1")
    name = name[1 : name.find("]")] if name.startswith("[") else name.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    return True
