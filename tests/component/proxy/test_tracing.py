"""Traces of the proxy, as a collector receives them: whose child each span is, and what it says."""

import asyncio
import itertools
import os
from collections.abc import Iterator

import pytest
from component.proxy.conftest import Start
from component.proxy.otlp_receiver import OtlpReceiver, attribute
from component.proxy.stack import Stack, completion_events, until
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from lockstep.bounce import Bounce

COMPLETION = {"model": "pico", "prompt": [5, 6, 7, 8], "max_tokens": 8}
CLIENTS_SPAN = "00f067aa0ba902b7"
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpReceiver]:
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "20"
    receiver = OtlpReceiver().start()
    yield receiver
    receiver.stop()
    del os.environ["OTEL_BSP_SCHEDULE_DELAY"]


@pytest.fixture
async def traced(start: Start, collector: OtlpReceiver) -> Stack:
    return await start("--otlp-traces-endpoint", f"http://127.0.0.1:{collector.port}")


def new_trace() -> str:
    return f"4bf92f3577b34da6a3ce929d{next(_numbers):08x}"


def parent(trace_id: str, *, sampled: bool = True) -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-{CLIENTS_SPAN}-0{sampled:d}"}


async def spans_of(collector: OtlpReceiver, trace_id: str, root: str = "POST") -> dict[str, list[Span]]:
    """By name, once the request's own span is there, which ends last."""
    await until(
        lambda: any(span.name.startswith(root) for span in collector.of(trace_id)), "the request's span"
    )
    named: dict[str, list[Span]] = {}
    for span in collector.of(trace_id):
        named.setdefault(span.name, []).append(span)
    return named


async def test_both_legs_and_the_push_are_below_the_clients_span(
    traced: Stack, collector: OtlpReceiver
) -> None:
    """client > request > attempt > prefill, push and decode; vLLM's own span is below the request too."""
    trace_id = new_trace()
    answer = await traced.http.post("/v1/completions", json=COMPLETION, headers=parent(trace_id))
    assert answer.status_code == 200
    spans = await spans_of(collector, trace_id)
    (request,) = spans["POST /v1/completions"]
    (attempt,) = spans["attempt"]
    assert request.parent_span_id.hex() == CLIENTS_SPAN
    assert request.kind == Span.SPAN_KIND_SERVER
    assert attribute(request, "http.response.status_code") == 200
    below = {name: span.parent_span_id for name, (span,) in spans.items()}
    assert below["attempt"] == below["queue"] == below["llm_request"] == request.span_id
    assert below["prefill"] == below["decode"] == below["kv_push"] == attempt.span_id
    assert attribute(spans["prefill"][0], "server.address") == traced.prefill[0].address
    assert attribute(spans["decode"][0], "server.address") == traced.decode[0].address
    assert collector.services == {"lockstep-proxy"}


async def test_the_push_lies_between_what_prefill_and_decode_report(
    traced: Stack, collector: OtlpReceiver
) -> None:
    """It begins as prefill ends and ends when decode schedules, on this machine's clock, not the nodes'."""
    trace_id = new_trace()
    traced.prefill[0].set.delay_s = 0.05
    await traced.http.post("/v1/completions", json=COMPLETION, headers=parent(trace_id))
    spans = await spans_of(collector, trace_id)
    (prefill,), (push,), (decode,) = spans["prefill"], spans["kv_push"], spans["decode"]
    (scheduled,) = [event for event in decode.events if event.name == "scheduled"]
    assert prefill.end_time_unix_nano - prefill.start_time_unix_nano >= 50e6
    assert abs(push.start_time_unix_nano - prefill.end_time_unix_nano) < 1e6
    assert abs(push.end_time_unix_nano - scheduled.time_unix_nano) < 1e6
    assert decode.start_time_unix_nano < push.end_time_unix_nano <= decode.end_time_unix_nano + 1e6


async def test_prefills_span_has_the_first_token(traced: Stack, collector: OtlpReceiver) -> None:
    """It goes out before the leg ends."""
    trace_id = new_trace()
    traced.prefill[0].set.pause_after_tokens = 1
    asking = asyncio.create_task(
        traced.http.post("/v1/completions", json=COMPLETION, headers=parent(trace_id))
    )
    await until(lambda: traced.prefill[0].num_paused, "prefill makes drafts")
    await asyncio.sleep(0.05)
    traced.prefill[0].set.go.set()
    await asking
    (prefill,) = (await spans_of(collector, trace_id))["prefill"]
    (first,) = [event for event in prefill.events if event.name == "first token"]
    assert prefill.start_time_unix_nano < first.time_unix_nano < prefill.end_time_unix_nano - 40e6


async def test_each_node_gets_the_span_of_its_leg_as_parent(traced: Stack, collector: OtlpReceiver) -> None:
    """With the client's tracestate, so that a node's own spans join the same trace."""
    trace_id = new_trace()
    headers = parent(trace_id) | {"tracestate": "vendor=1"}
    await traced.http.post("/v1/completions", json=COMPLETION, headers=headers)
    spans = await spans_of(collector, trace_id)
    for name, leg in (("prefill", traced.prefill_leg()), ("decode", traced.decode_leg())):
        (span,) = spans[name]
        assert leg.trace_headers == {
            "traceparent": f"00-{trace_id}-{span.span_id.hex()}-01",
            "tracestate": "vendor=1",
        }


async def test_an_attempt_that_failed_is_an_error_beside_the_next_one(
    traced: Stack, collector: OtlpReceiver
) -> None:
    """The stream goes on; the trace shows why the first attempt ended and what it had given."""
    trace_id = new_trace()
    traced.decode[0].set.ends = [(3, Bounce.PREEMPTED)]
    await traced.http.post("/v1/completions", json=COMPLETION, headers=parent(trace_id))
    spans = await spans_of(collector, trace_id)
    first, second = spans["attempt"]
    assert first.status.code == Status.STATUS_CODE_ERROR
    assert "preempted" in first.status.message
    assert attribute(second, "lockstep.attempt.reason") == "preempted"
    assert second.status.code == Status.STATUS_CODE_UNSET
    assert len(spans["prefill"]) == len(spans["decode"]) == len(spans["queue"]) == 2
    assert len(spans["llm_request"]) == 1


async def test_a_client_that_leaves_ends_all_spans(traced: Stack, collector: OtlpReceiver) -> None:
    """The request's span says that the answer was not sent to its end."""
    traced.decode[0].set.pause_after_tokens = 3
    known = {span.trace_id for span in collector.spans}
    stream = completion_events(traced, COMPLETION)
    await anext(stream)
    await stream.aclose()
    await until(
        lambda: {s.trace_id for s in collector.spans if s.name.startswith("POST")} - known, "its span"
    )
    (new,) = {span.trace_id for span in collector.spans} - known
    spans = await spans_of(collector, new.hex())
    (request,) = spans["POST /v1/completions"]
    assert request.status.code == Status.STATUS_CODE_ERROR
    assert not request.parent_span_id
    assert {"attempt", "prefill", "decode"} <= spans.keys()


async def test_a_client_that_asks_not_to_be_sampled_is_heard(traced: Stack, collector: OtlpReceiver) -> None:
    """Nothing of its trace is exported, and the nodes are told the same."""
    unsampled, sampled = new_trace(), new_trace()
    await traced.http.post("/v1/completions", json=COMPLETION, headers=parent(unsampled, sampled=False))
    assert traced.decode_leg().trace_headers["traceparent"].endswith("-00")
    await traced.http.post("/v1/completions", json=COMPLETION, headers=parent(sampled))
    await spans_of(collector, sampled)
    assert not collector.of(unsampled)


async def test_without_an_endpoint_nothing_is_traced(start: Start, collector: OtlpReceiver) -> None:
    """A client's context goes nowhere, and the nodes get none."""
    stack, trace_id = await start(), new_trace()
    await stack.http.post("/v1/completions", json=COMPLETION, headers=parent(trace_id))
    assert stack.decode_leg().trace_headers is None
    assert not collector.of(trace_id)
