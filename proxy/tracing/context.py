"""W3C trace context in the form in which vLLM carries it: the headers `traceparent` and `tracestate`."""

import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.trace import Span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_propagator = TraceContextTextMapPropagator()


def tracer() -> trace.Tracer:
    """Of the provider that vLLM's front end has set up; its spans go nowhere while there is none."""
    return trace.get_tracer("lockstep.proxy")


def headers_of(span: Span) -> dict[str, str]:
    """What makes other spans its children, on this machine or another one."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span))
    return carrier


def trace_id(headers: Mapping[str, str] | None) -> str:
    """The trace that headers belong to, in hexadecimal; empty if they name none."""
    parts = (headers or {}).get("traceparent", "").split("-")
    return parts[1] if len(parts) > 2 else ""


def wall_ns(monotonic_s: float) -> int:
    """When that was, in nanoseconds since the epoch, as spans have it."""
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)
