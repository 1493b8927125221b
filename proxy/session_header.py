"""ASGI middleware that reads X-Session-ID, by which a client says that its requests belong together."""

from contextvars import ContextVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

HEADER = "X-Session-ID"

session: ContextVar[str | None] = ContextVar("session", default=None)
"""That of the request at hand; its form was checked (proxy/security/headers.py)."""


class SessionHeader:
    """Makes the value known to whatever the route generates. An empty one is none."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        value = Headers(scope=scope).get(HEADER) if scope["type"] == "http" else None
        if not value:
            await self._app(scope, receive, send)
            return
        reset = session.set(value)
        try:
            await self._app(scope, receive, send)
        finally:
            session.reset(reset)
