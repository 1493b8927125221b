"""ASGI middleware: one server span for each request to the API, as a child of what the client traces."""

from typing import Any

from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.tracing import extract_trace_context, extract_trace_headers
from vllm.tracing.utils import TRACE_HEADERS

from proxy.tracing import context

_DROPPED = {name.encode() for name in TRACE_HEADERS}


class RequestSpan:
    """Lasts from the request's headers to the last byte of its answer, or to the client's leaving.

    The span takes the place of the client's in the request's headers. So whatever looks for a parent there is
    below it: vLLM's own `llm_request` and the attempts, on nodes too. A client that asks not to be sampled is
    heard, by the SDK's default sampler.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        span = context.tracer().start_span(
            scope["method"],
            extract_trace_context(extract_trace_headers(Headers(scope=scope))),
            SpanKind.SERVER,
            {"http.request.method": scope["method"], "url.path": scope["path"]},
        )
        inner = _under(scope, span)
        answer = _Answer(send, span)
        try:
            await self._app(inner, receive, answer)
        finally:
            route = getattr(inner.get("route"), "path", None)
            if route is not None:  # a path of the client's own making names no span
                span.update_name(f"{scope['method']} {route}")
                span.set_attribute("http.route", route)
            answer.close()


def _under(scope: Scope, span: Span) -> Scope:
    kept = [(name, value) for name, value in scope["headers"] if name.lower() not in _DROPPED]
    carried = context.headers_of(span).items()
    return {**scope, "headers": [*kept, *((name.encode(), value.encode()) for name, value in carried)]}


class _Answer:
    """Passes the answer on, and notes its status and whether it was sent to its end."""

    def __init__(self, send: Send, span: Span) -> None:
        self._send = send
        self._span = span
        self._status: int | None = None
        self._complete = False

    async def __call__(self, message: Message) -> Any:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif message["type"] == "http.response.body":
            self._complete = not message.get("more_body", False)
        await self._send(message)

    def close(self) -> None:
        if self._status is not None:
            self._span.set_attribute("http.response.status_code", self._status)
        if self._status is not None and self._status >= 500:
            self._span.set_status(Status(StatusCode.ERROR))
        elif not self._complete:
            self._span.set_status(Status(StatusCode.ERROR, "the answer was not sent to its end"))
        self._span.end()
