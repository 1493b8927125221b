"""ASGI middleware that asks for an API key, as OpenAI's and Anthropic's clients send it."""

import base64
import binascii
from collections.abc import Callable
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from proxy import unserved_routes
from proxy.metrics import Refusal
from proxy.security import answers
from proxy.security.key_source import KeySource
from proxy.security.keys import ApiKey

OPEN_PATHS = frozenset({"/health", "/healthz", "/readyz", "/ping"})
"""Whether the service is there, for those who only look after it; `/ping` is SageMaker's."""

CLIENT_ROOTS = frozenset(
    {
        *("v1", "v2", "inference", "cohere", "invocations", "generative_scoring"),
        *("tokenize", "detokenize", "tokenizer_info", "version"),
        *("docs", "redoc", "static", "openapi.json"),
        *(path.split("/")[1] for path in unserved_routes.PATHS),
    }
)
"""First parts of the paths that every key opens. All others show or change what is of all clients: metrics,
the status, and what vLLM may have besides, as its development routes."""

ANONYMOUS = ApiKey("-", b"", admin=True, priority=None)
"""Everybody, where no keys are asked for."""

current_key: ContextVar[ApiKey] = ContextVar("current_key", default=ANONYMOUS)
"""Whose request the one at hand is."""


class KeyGuard:
    """Outermost: what it refuses, nothing else has seen. Costs nothing per token.

    `admin_only`: every path needs an admin's key, as on the admin port.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeySource,
        refused: Callable[[Refusal], None],
        admin_only: bool = False,
    ) -> None:
        self._app = app
        self._keys = keys
        self._refused = refused
        self._admin_only = admin_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A browser asks with OPTIONS whether it may send a key, without one.
        if scope["type"] not in ("http", "websocket") or scope.get("method") == "OPTIONS":
            await self._app(scope, receive, send)
            return
        path = _normal(scope["path"].removeprefix(scope.get("root_path", "")))
        if path in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        shown = _shown(scope["headers"])
        key = self._keys.ring().find(shown) if shown is not None else None
        if key is None:
            self._refused(Refusal.UNAUTHENTICATED)
            message = "Incorrect API key provided." if shown is not None else answers.NO_KEY
            await self._refuse(401, message, "invalid_api_key", scope, receive, send)
        elif not key.admin and (self._admin_only or path.split("/")[1] not in CLIENT_ROOTS):
            self._refused(Refusal.FORBIDDEN)
            message = "This API key may not be used for this path."
            await self._refuse(403, message, "insufficient_permissions", scope, receive, send)
        else:
            reset = current_key.set(key)
            try:
                await self._app(scope, receive, send)
            finally:
                current_key.reset(reset)

    async def _refuse(
        self, status: int, message: str, code: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": message})
            return
        # Basic makes a browser ask for the key.
        scheme = "Basic" if self._admin_only else "Bearer"
        headers = {"WWW-Authenticate": f'{scheme} realm="lockstep"'} if status == 401 else {}
        await answers.refuse(scope, send, status, message, code, headers)


def _normal(path: str) -> str:
    return "/" + path.strip("/")


def _shown(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    """The key of `Authorization: Bearer` or `Basic` (as the password), or of Anthropic's `x-api-key`."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, credentials = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                return credentials.strip()
            if scheme.lower() == b"basic":
                return _password(credentials.strip())
            return None
    return next((value.strip() for name, value in headers if name == b"x-api-key"), None)


def _password(credentials: bytes) -> bytes | None:
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except binascii.Error:
        return None
