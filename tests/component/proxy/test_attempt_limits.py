"""Where attempts end: the cap, no node left, the deadline, a client that leaves; and what is counted."""

import asyncio
import logging
from typing import Any

import httpx
import pytest
from component.proxy.fake_node import FakeNode, Wire
from component.proxy.stack import PICO, Stack, completion_events, until
from component.proxy.test_attempts import ASK, PROMPT, ask, attempts, carried, nothing_is_left, two_pairs
from component.proxy.test_status import document, sample
from vllm.v1.engine import FinishReason

from lockstep.bounce import Bounce

FOREVER = 1000


@pytest.mark.parametrize("most", [1, 3])
async def test_bounces_without_an_end_are_given_up(start: Any, most: int) -> None:
    """At the cap the client is told how often and why; 1 never tries again."""
    stack: Stack = await start("--max-attempts", str(most))
    stack.decode[0].set.ends = [(0, Bounce.PREEMPTED)] * FOREVER
    status, body = await ask(stack)
    assert status == 503
    times = "1 attempt" if most == 1 else f"{most} attempts"
    reason = "The decode rank needed the memory for other requests."
    assert body["error"]["message"].startswith(f"Gave up after {times}: {reason} (request id: cmpl-abc")
    assert len(stack.decode[0].legs) == most
    await nothing_is_left(stack)


async def test_cap_in_mid_stream_is_an_error_event(start: Any) -> None:
    """The client has text already: an event with the code, and no finish reason."""
    stack: Stack = await start("--max-attempts", "2")
    stack.decode[0].set.ends = [(3, Bounce.PREEMPTED)] * FOREVER
    stream = [event async for event in completion_events(stack, ASK)]
    error = stream.pop()["error"]
    assert (error["code"], error["message"][:21]) == (503, "Gave up after 2 attem")
    assert all(event["choices"][0]["finish_reason"] is None for event in stream)
    assert PROMPT.startswith("".join(event["choices"][0]["text"] for event in stream))
    await nothing_is_left(stack)


async def test_no_attempt_follows_an_error_that_would_come_again(stack: Stack) -> None:
    """A refusal that is the request's own fault, decode without room, an end nobody asked for."""
    stack.decode[0].set.fail_first = 1
    assert (await ask(stack))[0] == 400
    stack.decode[0].set.ends = [(0, Bounce.CONTEXT_LIMIT)]
    status, body = await ask(stack)
    assert status == 500
    assert "no room left below the served context limit" in body["error"]["message"]
    stack.decode[0].set.ends = [(3, FinishReason.ERROR)]
    status, body = await ask(stack)
    assert (status, body["error"]["message"][:22]) == (500, "The generation failed.")
    assert attempts(stack) == {"first": 3}
    await nothing_is_left(stack)


async def test_decode_lost_without_another_is_an_error_event_at_once(stack: Stack) -> None:
    """Nothing is left that could go on: never a normal end, and no waiting for the node to come back."""
    stack.decode[0].set.pause_after_tokens = 6
    stream = completion_events(stack, ASK)
    first = await anext(stream)
    await stack.decode[0].stop()
    rest = [event async for event in stream]
    error = rest.pop()["error"]
    assert error["code"] == 503
    assert "No decode node is ready. Before that: A node that held the request went away." in error["message"]
    assert all(event["choices"][0]["finish_reason"] is None for event in [first, *rest])
    await nothing_is_left(stack)


async def test_chosen_decode_rank_is_kept_and_not_replaced(start: Any) -> None:
    """A bounced request goes back to the rank its client chose; when that rank is lost it ends."""
    stack = await two_pairs(start)
    stack.decode[1].set.ends = [(6, Bounce.KV_LOAD_FAILED)]
    stack.decode[1].set.pause_after_tokens = 9
    body = {**ASK, "stream": True}
    async with stack.http.stream(
        "POST", "/v1/completions", json=body, headers={"X-data-parallel-rank": "1"}
    ) as answer:
        lines = answer.aiter_lines()
        assert answer.status_code == 200
        await until(lambda: carried(stack.decode[1]) == [0, 6], "the next attempt is there")
        await stack.decode[1].stop()
        text = "\n".join([line async for line in lines])
    assert "Decode rank 1 is not ready." in text
    assert '"finish_reason":"stop"' not in text
    assert not stack.decode[0].legs
    await nothing_is_left(stack)


async def test_deadline_goes_on_over_attempts(start: Any) -> None:
    """Attempts that end quickly do not give the request more time."""
    stack: Stack = await start("--request-timeout-s", "0.5", "--max-attempts", str(FOREVER))
    stack.decode[0].set.delay_s = 0.05
    stack.decode[0].set.ends = [(0, Bounce.PREEMPTED)] * FOREVER
    status, _ = await ask(stack)
    assert status == 504
    assert 1 < len(stack.decode[0].legs) <= 11
    await nothing_is_left(stack)


async def test_request_that_was_sent_before_goes_ahead_of_new_ones(start: Any) -> None:
    """Its client waits in mid-stream; the queue's others have seen nothing yet."""
    stack: Stack = await start("--prefill-window-tokens", "1", "--hand-off", "off")
    prefill, decode = stack.prefill[0], stack.decode[0]
    decode.set.ends, decode.set.pause_after_tokens = [(6, Bounce.PREEMPTED)], 6
    bounced = asyncio.create_task(ask(stack))
    await until(lambda: decode.running and not prefill.running, "the first is in mid-stream")
    prefill.set.pause_after_tokens = 0
    others = [asyncio.create_task(ask(stack, prompt=[7] * length)) for length in (20, 21)]
    await until(lambda: prefill.running and stack.client.flow.num_queued == 1, "one runs, one waits")
    decode.set.go.set()
    await until(lambda: stack.client.flow.num_queued == 2, "the first waits for its next attempt")
    prefill.set.go.set()
    assert [(await task)[0] for task in (bounced, *others)] == [200] * 3
    prompt_tokens = len(prefill.legs[0].request.prompt_token_ids or ())
    lengths = [len(leg.request.prompt_token_ids or ()) for leg in prefill.legs]
    assert lengths == [prompt_tokens, 20, prompt_tokens, 21]


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
async def test_disconnect_during_a_later_attempt(start: Any, phase: str) -> None:
    """While the choice waits for its next attempt, and on either side: nothing is left anywhere."""
    stack: Stack = await start("--prefill-window-tokens", "1", "--hand-off", "off")
    prefill, decode = stack.prefill[0], stack.decode[0]
    decode.set.ends, decode.set.pause_after_tokens = [(6, Bounce.PREEMPTED)], 6
    async with httpx.AsyncClient(base_url=stack.http.base_url) as leaver:
        asking = asyncio.create_task(leaver.post("/v1/completions", json={**ASK, "stream": True}))
        await until(lambda: decode.num_paused == 1 and not prefill.running, "the first attempt pauses")
        blocker = None
        if phase != "decode":
            prefill.set.pause_after_tokens = 0
        if phase == "queued":
            blocker = asyncio.create_task(ask(stack, prompt=[7] * 20, max_tokens=3))
            await until(lambda: prefill.running, "another prompt is computed")
        go = decode.set.go
        if phase == "decode":
            decode.set.go = asyncio.Event()
        go.set()
        reached = {
            "queued": lambda: stack.client.flow.num_queued == 1,
            "prefill": lambda: carried(prefill) == [0, 6] and prefill.running,
            "decode": lambda: carried(decode) == [0, 6] and not prefill.running,
        }
        await until(reached[phase], f"the second attempt is at {phase}")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: stack.client.flow.num_in_flight == (blocker is not None), "the choice is gone")
    prefill.set.go.set()
    if blocker:
        assert (await blocker)[0] == 200
    await nothing_is_left(stack)


async def test_attempts_are_counted_and_logged(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    """By reason, per choice, with the wait between; vLLM counts the preemption; one line a request."""
    logging.getLogger("proxy").propagate = True
    stack.decode[0].set.ends = [(6, Bounce.PREEMPTED), (3, Bounce.KV_LOAD_FAILED)]
    with caplog.at_level(logging.INFO, logger="proxy"):
        assert (await ask(stack))[0] == 200
    proxy = (await document(stack)).proxy
    assert {k: n for k, n in proxy.attempts_by_reason.items() if n} == {
        "first": 1,
        "preempted": 1,
        "kv_load_failed": 1,
    }
    assert proxy.attempt_gap_count == 2
    assert 0 < proxy.attempt_gap_sum_s < 5
    assert proxy.ttft_count == 1
    assert await sample(stack, "lockstep_proxy_attempts_per_request_sum") == 3
    assert await sample(stack, "lockstep_proxy_attempts_per_request_count") == 1
    assert await sample(stack, "lockstep_proxy_attempt_gap_seconds_count") == 2
    assert await sample(stack, "vllm:num_preemptions_total") == 1
    assert await sample(stack, "vllm:prompt_tokens_total") == len(stack.prefill_leg().prompt_token_ids)
    (line,) = [
        r.getMessage() for r in caplog.records if "output_tokens=" in r.getMessage() and r.levelno == 20
    ]
    assert "attempts=3(first,preempted,kv_load_failed)" in line
    assert "token_t3_ms=" in line
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [" attempt 1 ended while streaming: preempted" in warnings[0], len(warnings)] == [True, 2]
    assert stack.decode[0].address in warnings[0]
    assert stack.prefill[0].address in warnings[0]


async def test_failed_attempt_avoids_its_rank(start: Any) -> None:
    """A rank that failed comes last for this choice, though it has the fewest requests."""
    wire = Wire()
    decode = FakeNode("decode", wire, PICO, num_ranks=3)
    stack: Stack = await start(prefill=[FakeNode("prefill", wire, PICO)], decode=[decode])
    decode.set.ends = [(0, Bounce.KV_LOAD_FAILED)] * 4
    assert (await ask(stack))[0] == 200
    ranks = [leg.rank for leg in decode.legs]
    assert sorted(ranks[:3]) == [0, 1, 2]
    assert ranks[3:] == ranks[:2]
