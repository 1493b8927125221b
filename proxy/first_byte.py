"""ASGI middleware that answers with an HTTP status when a stream fails before its first event."""

import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class FirstByteGate:
    """Holds an event stream's headers back until its first bytes are known.

    vLLM sends the 200 of a streaming answer before the engine has done anything, and then can only report an
    error as an event. Until the first token there is nothing to lose by waiting.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, _Gate(send))


class _Gate:
    def __init__(self, send: Send) -> None:
        self._send = send
        self._held: Message | None = None
        self._answered = False

    async def __call__(self, message: Message) -> None:
        if self._answered:
            return
        if message["type"] == "http.response.start" and _is_event_stream(message):
            self._held = message
            return
        if self._held is None:
            await self._send(message)
            return
        body = message.get("body", b"")
        if not body and message.get("more_body", False):
            return
        start, self._held = self._held, None
        error = _error_event(body)
        if error is None:
            await self._send(start)
            await self._send(message)
            return
        self._answered = True
        await self._send_error(start, error)

    async def _send_error(self, start: Message, error: dict[str, Any]) -> None:
        body = json.dumps(error).encode()
        kept = [(k, v) for k, v in start["headers"] if k.lower() not in (b"content-type", b"content-length")]
        headers = [
            *kept,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await self._send({**start, "status": error["error"]["code"], "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


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
    event = json.loads(line.removeprefix(b"data: "))
    code = event["error"].get("code")
    return event if isinstance(code, int) and 400 <= code < 600 else None
