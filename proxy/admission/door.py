"""ASGI middleware that lets a request in: its key's concurrency, its body's size, and when to come back."""

import re
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep.errors import RateLimitedError
from proxy.admission.accounts import Accounts, current_account
from proxy.metrics import Refusal
from proxy.security import answers
from proxy.security.guard import current_key

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_DIGITS = re.compile(rb"[0-9]{1,18}")
_RETRY_S = 1
_DISCONNECT: Message = {"type": "http.disconnect"}


@dataclass(slots=True)
class RetryAfter:
    """When the client of the request at hand may come back after a 429 or 503, if somebody knows."""

    seconds: int | None = None


retry_after: ContextVar[RetryAfter] = ContextVar("retry_after", default=RetryAfter())  # noqa: B039 - as below
"""Filled in by whoever refuses; nobody reads the default."""


class Bodies:
    """The bytes of all bodies that requests in progress have sent; an answer's end gives its own back."""

    def __init__(self, each_bytes: int, all_bytes: int) -> None:
        self.each_bytes = each_bytes
        self.all_bytes = all_bytes
        self.held_bytes = 0


class Door:
    """Innermost of what stands before vLLM's own middleware: whoever gets here has shown a key."""

    def __init__(
        self,
        app: ASGIApp,
        accounts: Accounts,
        bodies: Bodies,
        refused: Callable[[Refusal], None],
        retry_after_s: Callable[[], int],
    ) -> None:
        self._app = app
        self._accounts = accounts
        self._bodies = bodies
        self._refused = refused
        self._retry_after_s = retry_after_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _READING:
            await self._app(scope, receive, send)
            return
        account = self._accounts.of(current_key.get())
        try:
            account.enter()
        except RateLimitedError as error:
            self._refused(Refusal.KEY_REQUESTS)
            headers = {"Retry-After": str(error.retry_after_s)}
            await answers.refuse(scope, send, 429, str(error), "rate_limit_exceeded", headers)
            return
        visit = _Visit(scope, receive, send, self._bodies, self._refused, self._retry_after_s)
        resets = current_account.set(account), retry_after.set(visit.retry_after)
        try:
            await visit.run(self._app)
        finally:
            current_account.reset(resets[0])
            retry_after.reset(resets[1])
            account.leave()
            self._bodies.held_bytes -= visit.body_bytes


class _Visit:
    """One request: what of its body has come, and whether it has been refused for that."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        bodies: Bodies,
        refused: Callable[[Refusal], None],
        retry_after_s: Callable[[], int],
    ) -> None:
        self.body_bytes = 0
        self.retry_after = RetryAfter()
        self._scope = scope
        self._receive = receive
        self._send = send
        self._bodies = bodies
        self._refused = refused
        self._retry_after_s = retry_after_s
        self._over = False

    async def run(self, app: ASGIApp) -> None:
        announced = next((value for name, value in self._scope["headers"] if name == b"content-length"), b"")
        if _DIGITS.fullmatch(announced) and not await self._fits(int(announced)):
            return
        try:
            await app(self._scope, self.receive, self.send)
        except Exception:  # a mapper: what comes of a body that was cut off is answered already
            if not self._over:
                raise

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            chunk_bytes = len(message.get("body", b""))
            self.body_bytes += chunk_bytes
            self._bodies.held_bytes += chunk_bytes
            if not await self._fits(self.body_bytes):
                return _DISCONNECT
        return message

    async def send(self, message: Message) -> None:
        if self._over:
            return
        if message["type"] == "http.response.start" and message["status"] in (429, 503):
            self._say_when(message)
        await self._send(message)

    def _say_when(self, start: Message) -> None:
        headers = start.get("headers", ())
        if all(name.lower() != b"retry-after" for name, _ in headers):
            seconds = self.retry_after.seconds or self._retry_after_s()
            start["headers"] = [*headers, (b"retry-after", str(seconds).encode())]

    async def _fits(self, body_bytes: int) -> bool:
        """Whether the body may be so large; if not, the request is answered."""
        if body_bytes > self._bodies.each_bytes:
            self._over = True
            self._refused(Refusal.BODY_SIZE)
            message = f"The request's body is larger than {self._bodies.each_bytes} bytes."
            await answers.refuse(self._scope, self._send, 413, message, "request_too_large")
        elif body_bytes - self.body_bytes + self._bodies.held_bytes > self._bodies.all_bytes:
            self._over = True
            self._refused(Refusal.BODIES)
            message = "The service holds as many requests' bodies as it can."
            headers = {"Retry-After": str(_RETRY_S)}
            await answers.refuse(self._scope, self._send, 503, message, "overloaded", headers)
        return not self._over
