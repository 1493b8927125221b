"""ASGI middleware that gives a stream's failure a status before the first token and an event after it."""

import json
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_OPENING = (b"event: response.created\n", b"event: response.in_progress\n")
"""Events of /v1/responses that come before there is a token."""


@dataclass(slots=True)
class Failure:
    """What the generation of the request at hand failed with: the body of OpenAI's error, or None."""

    body: Mapping[str, Any] | None = None


failure: ContextVar[Failure] = ContextVar("failure", default=Failure())  # noqa: B039 - nobody reads the default
"""Filled in by the front end, because not each of vLLM's routes hands an error of a stream on as it is."""


class FirstByteGate:
    """Holds an event stream's headers back until its first token is there, and ends no stream silently.

    vLLM sends the 200 of a streaming answer before the engine has done anything, and then can only report an
    error as an event. Until the first token there is nothing to lose by waiting. Later, /v1/completions and
    chat report the error well; /v1/messages reports its own failure to read that report as a chunk
    (anthropic/serving.py::message_stream_converter), and /v1/responses drops the connection.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        failed = Failure()
        gate = _Gate(send, scope.get("path", ""), failed)
        reset = failure.set(failed)
        try:
            await self._app(scope, receive, gate)
        except Exception:  # a mapper: what it cannot name goes on as it is
            if not await gate.failed():
                raise
        finally:
            failure.reset(reset)


class _Gate:
    def __init__(self, send: Send, path: str, failed: Failure) -> None:
        self._send = send
        self._path = path
        self._failure = failed
        self._streams = False
        self._held: list[Message] = []
        self._events = 0
        self._over = False

    async def __call__(self, message: Message) -> None:
        if self._over:
            return
        if message["type"] == "http.response.start" and _is_event_stream(message):
            self._streams = True
            self._held.append(message)
        elif self._streams:
            await self._body(message, message.get("body", b""))
        else:
            await self._send(message)

    async def failed(self) -> bool:
        """The app gave up on its answer: end it with the error. False without a stream or a known error."""
        if not self._streams or self._over or self._failure.body is None:
            return False
        self._over = True
        if self._held:
            await self._send_status(self._failure.body)
        else:
            await self._send({"type": "http.response.body", "body": self._event(self._failure.body)})
        return True

    async def _body(self, message: Message, body: bytes) -> None:
        typed = body.startswith(b"event: error\n") and self._failure.body is not None
        error = self._failure.body if typed else _error_event(body)
        if self._held and error is not None:
            self._over = True
            await self._send_status(error)
        elif self._held and message.get("more_body", False) and (not body or body.startswith(_OPENING)):
            self._held.append(message)
        else:
            for held in self._held:
                await self._pass(held)
            self._held.clear()
            await self._pass({**message, "body": self._event(error)} if typed and error else message)

    async def _pass(self, message: Message) -> None:
        self._events += bool(message.get("body"))
        await self._send(message)

    async def _send_status(self, error: Mapping[str, Any]) -> None:
        """The error as an answer of its own; headers of the stream that still hold are kept."""
        start = self._held[0]
        kept = [(k, v) for k, v in start["headers"] if k.lower() not in (b"content-type", b"content-length")]
        body = json.dumps(_anthropic(error) if self._is_messages else error).encode()
        headers = [
            *kept,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await self._send({**start, "status": error["error"]["code"], "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _event(self, error: Mapping[str, Any]) -> bytes:
        """The error as the last event of the route's own kind of stream."""
        if self._is_messages:
            return _sse("error", _anthropic(error))
        inner = error["error"]
        event = {"type": "error", "code": str(inner["code"]), "message": inner["message"]}
        return _sse("error", event | {"param": inner["param"], "sequence_number": self._events})

    @property
    def _is_messages(self) -> bool:
        return self._path.endswith("/v1/messages")


def _sse(kind: str, data: Mapping[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()


def _anthropic(error: Mapping[str, Any]) -> dict[str, Any]:
    """As vLLM translates errors of that route (anthropic/api_router.py::translate_error_response)."""
    inner = error["error"]
    return {"type": "error", "error": {"type": inner["type"], "message": inner["message"]}}


def _is_event_stream(start: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in start["headers"]
    )


def _error_event(body: bytes) -> dict[str, Any] | None:
    """The body of vLLM's error event (generate/base/serving.py::create_streaming_error_response), or None."""
    line = body.split(b"\n", 1)[0]
    if not line.startswith(b'data: {"error"'):
        return None
    event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    code = event["error"].get("code")
    return event if isinstance(code, int) and 400 <= code < 600 else None
