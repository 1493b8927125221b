"""The spans of one attempt: the wait before it, both legs, and the push of the KV between them.

<client's span>
  POST /v1/chat/completions   proxy/tracing/request_span.py
    llm_request               vLLM's own, one for each choice
    queue                     until the attempt was sent
    attempt
      prefill                 the prefill leg; its node gets this span as the parent
      kv_push                 from the prompt's end on prefill to decode's scheduling it with its KV
      decode                  the decode leg; its node gets this span as the parent
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from vllm.tracing import SpanAttributes, extract_trace_context
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreRequest

from proxy.attempt import Attempt
from proxy.nodes import Role
from proxy.routing import RankLoad
from proxy.tracing.context import headers_of, tracer, wall_ns


@dataclass(slots=True, eq=False)
class AttemptSpans:
    """Open from the sending of the legs to the attempt's end. All times in spans are measured ones."""

    attempt: Span
    prefill: Span
    decode: Span
    decode_scheduled_s: float = 0.0
    """When the decode rank scheduled the request: its KV was there. On this process's clock."""

    def leg(self, role: Role, request: EngineCoreRequest) -> EngineCoreRequest:
        """The same leg, with its span as the parent of whatever the node traces of it."""
        span = self.prefill if role == "prefill" else self.decode
        leg: EngineCoreRequest = msgspec.structs.replace(request, trace_headers=headers_of(span))
        return leg

    def took(self, role: Role, output: EngineCoreOutput) -> None:
        """An output of the live attempt came; its events are on this process's clock already."""
        if role == "decode" and not self.decode_scheduled_s:
            for event in output.events or ():
                if event.type == EngineCoreEventType.SCHEDULED:
                    self.decode_scheduled_s = event.timestamp

    def close(self, attempt: Attempt, output_tokens: int) -> None:
        """The attempt is over, with an answer or without."""
        failed = attempt.end
        if attempt.prefill_scheduled_s:
            self.prefill.add_event("scheduled", timestamp=wall_ns(attempt.prefill_scheduled_s))
        if attempt.early_token_ids:
            self.prefill.add_event("first token", timestamp=wall_ns(attempt.first_output_s))
        if self.decode_scheduled_s:
            self.decode.add_event("scheduled", timestamp=wall_ns(self.decode_scheduled_s))
        if attempt.arrived_s:
            self.decode.add_event("first output", timestamp=wall_ns(attempt.arrived_s))
        self._push(attempt)
        if failed is not None:
            status = Status(StatusCode.ERROR, f"{failed.reason}: {failed.message}")
            self.attempt.set_status(status)
            for role, span in (("prefill", self.prefill), ("decode", self.decode)):
                if role in failed.failed:
                    span.set_status(status)
        self.attempt.set_attribute(SpanAttributes.GEN_AI_USAGE_COMPLETION_TOKENS, output_tokens)
        end = wall_ns(attempt.ended_s)
        self.prefill.end(wall_ns(attempt.prefilled_s) if attempt.prefilled_s else end)
        self.decode.end(end)
        self.attempt.end(end)

    def _push(self, attempt: Attempt) -> None:
        """Chunks go earlier, beside the prefill leg: this is what was left when the prompt was computed.

        Both its ends are said by the nodes, in a prefill step and by decode's scheduler. A push that nobody
        waited for to the end (a client that left, an answer of one token) has no span.
        """
        if not attempt.prefilled_s:
            return
        failed = attempt.end is not None and not self.decode_scheduled_s
        if not self.decode_scheduled_s and not failed:
            return
        ended_s = self.decode_scheduled_s or attempt.ended_s
        span = tracer().start_span(
            "kv_push",
            trace.set_span_in_context(self.attempt),
            start_time=wall_ns(attempt.prefilled_s),
            attributes={"lockstep.prefill": _rank(attempt.prefill), "lockstep.decode": _rank(attempt.decode)},
        )
        if failed:
            span.set_status(Status(StatusCode.ERROR, "decode never had the KV"))
        span.end(wall_ns(max(ended_s, attempt.prefilled_s)))


def begin(
    headers: Mapping[str, str] | None, attempt: Attempt, request_id: str, since_s: float
) -> AttemptSpans | None:
    """The spans of an attempt that is about to be sent, below `headers`; None where nothing is traced.

    `since_s`: since when the choice has waited for it, on this process's monotonic clock.
    """
    if headers is None:
        return None
    parent = extract_trace_context(headers)
    start = wall_ns(attempt.dispatched_s)
    wait = tracer().start_span("queue", parent, start_time=wall_ns(since_s))
    wait.end(start)
    whole = tracer().start_span(
        "attempt",
        parent,
        attributes={
            SpanAttributes.GEN_AI_REQUEST_ID: request_id,
            SpanAttributes.GEN_AI_USAGE_PROMPT_TOKENS: attempt.tokens,
            "lockstep.leg_id": attempt.leg_id,
            "lockstep.attempt.number": attempt.number,
            "lockstep.attempt.reason": str(attempt.reason),
            "lockstep.hand_off": attempt.hand_off,
        },
        start_time=start,
    )
    below = trace.set_span_in_context(whole)
    prefill, decode = (
        tracer().start_span(role, below, SpanKind.CLIENT, _where(load), start_time=start)
        for role, load in (("prefill", attempt.prefill), ("decode", attempt.decode))
    )
    return AttemptSpans(whole, prefill, decode)


def _where(load: RankLoad) -> dict[str, str | int]:
    return {
        "server.address": load.node.address,
        "lockstep.rank": load.rank.local_rank,
        "lockstep.engine_id": load.rank.engine_id,
    }


def _rank(load: RankLoad) -> str:
    return f"{load.node.address}/{load.rank.local_rank}"
