"""Errors: a status and OpenAI's body before the first byte, an error event after it, and no finish."""

import asyncio
from typing import Any

import pytest
from component.proxy.fake_node import FakeNode, draining
from component.proxy.stack import Stack, completion_events, until
from vllm.v1.engine import FinishReason

ASK: dict[str, Any] = {"model": "pico", "prompt": "Some words to say again and again.", "max_tokens": 50}


async def ask(stack: Stack, **body: Any) -> tuple[int, dict[str, Any]]:
    answer = await stack.http.post("/v1/completions", json={**ASK, **body}, headers={"X-Request-Id": "abc"})
    return answer.status_code, answer.json()


@pytest.mark.parametrize("stream", [False, True])
async def test_no_decode_node_is_503(stack: Stack, stream: bool) -> None:
    """Whether the answer was to be streamed or not: the status, OpenAI's body, and the request's id."""
    await stack.decode[0].stop()
    await until(lambda: stack.client.flow.not_ready_because(), "the proxy notices")
    status, body = await ask(stack, stream=stream)
    assert status == 503
    assert body["error"]["code"] == 503
    assert body["error"]["message"].startswith("No decode node is ready. (request id: cmpl-abc")


async def test_no_prefill_node_is_503(stack: Stack) -> None:
    """The other side alone can do nothing either."""
    await stack.prefill[0].stop()
    await until(lambda: stack.client.flow.not_ready_because(), "the proxy notices")
    status, body = await ask(stack)
    assert status == 503
    assert "No prefill node is ready." in body["error"]["message"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_node_lost_before_the_first_token_is_503(stack: Stack, role: str, stream: bool) -> None:
    """Both nodes hold the request and nothing has been sent to the client yet."""
    node: FakeNode = (stack.prefill if role == "prefill" else stack.decode)[0]
    stack.prefill[0].set.pause_after_tokens = 0
    asking = asyncio.create_task(ask(stack, stream=stream))
    await until(lambda: stack.decode[0].running and stack.prefill[0].running, "both legs arrive")
    await node.stop()
    status, body = await asking
    assert status == 503
    assert "A node that held the request went away." in body["error"]["message"]


async def test_decode_lost_in_mid_stream_is_an_error_event(stack: Stack) -> None:
    """The client has text already: it gets an error event with the code, and no finish reason."""
    stack.decode[0].set.pause_after_tokens = 6
    stream = completion_events(stack, ASK)
    first = await anext(stream)
    await stack.decode[0].stop()
    rest = [event async for event in stream]
    assert first["choices"][0]["text"]
    assert rest[-1]["error"]["code"] == 503
    assert all(event["choices"][0]["finish_reason"] is None for event in [first, *rest[:-1]])


async def test_prefill_lost_in_mid_stream_does_not_matter(stack: Stack) -> None:
    """Decode's first token shows that the KV has arrived; prefill is not needed any more."""
    stack.decode[0].set.pause_after_tokens = 6
    stream = completion_events(stack, ASK)
    await anext(stream)
    await stack.prefill[0].stop()
    await until(lambda: stack.client.flow.not_ready_because(), "the proxy notices")
    stack.decode[0].set.go.set()
    rest = [event async for event in stream]
    assert rest[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_leg_refused_by_the_only_node_fails_the_request_and_aborts_the_other(
    stack: Stack, role: str
) -> None:
    """A node that drains takes nothing more: the answer is 503 at once; the other leg is not left behind."""
    refusing, other = stack.prefill[0], stack.decode[0]
    if role == "decode":
        refusing, other = other, refusing
        stack.prefill[0].set.pause_after_tokens = 0
    refusing.set.fail_first, refusing.set.fail_with = 1, draining()
    status, body = await ask(stack)
    assert status == 503
    message = body["error"]["message"]
    assert message.startswith(f"No {role} node is ready. Before that: this node is shutting down")
    await until(lambda: other.aborted and not other.running, "the other leg is aborted")
    assert (len(stack.prefill[0].refused), len(stack.decode[0].refused)) in ((1, 0), (0, 1))


@pytest.mark.parametrize(
    ("reason", "answer", "message"),
    [
        (FinishReason.ERROR, 503, "The prompt could not be computed."),
        (FinishReason.ABORT, 503, "A node that held the request went away."),
        (FinishReason.STOP, 500, "The prompt could not be computed."),
    ],
)
async def test_prefill_that_ends_badly_fails_the_request(
    stack: Stack, reason: FinishReason, answer: int, message: str
) -> None:
    """Only an end by length means that the KV is pushed; decode is aborted, since nothing will come."""
    stack.prefill[0].set.finish_with = reason
    stack.decode[0].set.pause_after_tokens = 0
    status, body = await ask(stack)
    assert status == answer
    assert message in body["error"]["message"]
    await until(lambda: stack.decode[0].aborted and not stack.decode[0].running, "decode is aborted")


async def test_kv_that_does_not_arrive_is_503(stack: Stack) -> None:
    """vLLM ends a request whose KV load failed with `error`; that each attempt's does is told in the end."""
    stack.decode[0].set.finish_with = FinishReason.ERROR
    status, body = await ask(stack)
    assert status == 503
    assert "The KV cache did not reach the decode rank." in body["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_request_that_takes_too_long_is_504(start: Any, stream: bool) -> None:
    """The deadline ends both legs."""
    stack: Stack = await start("--request-timeout-s", "0.3")
    stack.prefill[0].set.pause_after_tokens = 0
    status, body = await ask(stack, stream=stream)
    assert status == 504
    assert "The request did not finish in its time." in body["error"]["message"]
    await until(lambda: stack.prefill[0].aborted and stack.decode[0].aborted, "both legs are aborted")


async def test_one_failed_choice_fails_the_answer_and_ends_its_siblings(stack: Stack) -> None:
    """n=2 is one answer: half of it is no answer, and no leg goes on for nobody."""
    stack.prefill[0].set.pause_after_tokens = 0
    stack.decode[0].set.fail_first = 1
    status, _ = await ask(stack, n=2, temperature=1)
    assert status == 400
    await until(lambda: not stack.prefill[0].running and not stack.decode[0].running, "all legs end")
    assert not stack.front_end.output_processor.request_states


async def test_failed_requests_leave_nothing_behind(stack: Stack) -> None:
    """vLLM's books and ours are empty afterwards."""
    stack.decode[0].set.fail_first = 5
    assert [(await ask(stack))[0] for _ in range(5)] == [400] * 5
    processor = stack.front_end.output_processor
    assert not processor.request_states
    assert not processor.parent_requests
    assert not processor.external_req_ids
    assert (await ask(stack))[0] == 200
