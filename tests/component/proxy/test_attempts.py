"""Attempts: a client's answer is whole however its work was handed back, refused or lost on the way.

The fake nodes refuse a leg whose carried tokens are not exactly what the client has had, so a right answer
also means that each attempt began where the one before had ended.
"""

import asyncio
from typing import Any

import pytest
from component.proxy.fake_node import FakeNode, Wire, draining
from component.proxy.stack import PICO, Stack, completion_events, events, until
from vllm.v1.engine import FinishReason

from lockstep.bounce import Bounce
from lockstep.errors import LockstepError, UnavailableError
from proxy.metrics import AttemptReason

PROMPT = "The cat sat on the mat and looked at the moon."
ASK: dict[str, Any] = {"model": "pico", "prompt": PROMPT, "max_tokens": 100, "temperature": 0}

BOUNCES = {
    Bounce.PREEMPTED: AttemptReason.PREEMPTED,
    Bounce.KV_LOAD_FAILED: AttemptReason.KV_LOAD_FAILED,
    Bounce.LOCAL_PREFILL: AttemptReason.LOCAL_PREFILL,
}


@pytest.fixture
async def stack(start: Any) -> Stack:
    """Every token comes from decode, so that its first may be missing; test_hand_off.py has the other way."""
    made: Stack = await start("--hand-off", "off")
    return made


async def ask(stack: Stack, **body: Any) -> tuple[int, dict[str, Any]]:
    answer = await stack.http.post("/v1/completions", json={**ASK, **body}, headers={"X-Request-Id": "abc"})
    return answer.status_code, answer.json()


def attempts(stack: Stack) -> dict[str, int]:
    """How many of each reason were sent."""
    counted = stack.client.flow.metrics.attempts.collect()[0].samples
    return {s.labels["reason"]: int(s.value) for s in counted if s.name.endswith("_total") and s.value}


def carried(node: FakeNode) -> list[int]:
    """How many tokens each leg of a node carried."""
    return [len(leg.carried) for leg in node.legs]


async def nothing_is_left(stack: Stack) -> None:
    """No leg runs on any node, no load counts, nothing waits."""
    nodes = [*stack.prefill, *stack.decode]
    await until(lambda: not any(node.running for node in nodes), "all legs end")
    flow = stack.client.flow
    assert flow.num_in_flight == flow.num_queued == 0
    loads = [load for node in nodes for load in flow.ranks.of(node.address).values()]
    assert {(load.in_flight, load.outstanding_tokens) for load in loads} <= {(0, 0)}
    assert not stack.front_end.output_processor.request_states


async def two_pairs(start: Any, *flags: str) -> Stack:
    wire = Wire()
    stack: Stack = await start(
        *("--hand-off", "off"),
        *flags,
        prefill=[FakeNode("prefill", wire, PICO) for _ in range(2)],
        decode=[FakeNode("decode", wire, PICO) for _ in range(2)],
    )
    await until(lambda: len(list(stack.cluster.live("prefill"))) == 2, "both prefill nodes connect")
    await until(lambda: len(list(stack.cluster.live("decode"))) == 2, "both decode nodes connect")
    return stack


@pytest.mark.parametrize("after_tokens", [0, 6])
@pytest.mark.parametrize("bounce", BOUNCES)
async def test_bounced_answer_equals_the_unbroken_one(
    stack: Stack, bounce: Bounce, after_tokens: int
) -> None:
    """Before the first token and in mid-stream: text, finish and usage as if nothing had happened."""
    _, unbroken = await ask(stack)
    stack.decode[0].set.ends = [(after_tokens, bounce), (after_tokens, bounce)]
    status, body = await ask(stack)
    assert status == 200
    assert body["choices"] == unbroken["choices"]
    assert body["usage"] == unbroken["usage"]
    assert carried(stack.prefill[0]) == carried(stack.decode[0]) == [0, 0, after_tokens, 2 * after_tokens]
    assert attempts(stack) == {"first": 2, BOUNCES[bounce]: 2}
    await nothing_is_left(stack)


async def test_stream_goes_on_after_a_bounce(stack: Stack) -> None:
    """One stream: no token twice, none lost, one finish, usage of all attempts together."""
    stack.decode[0].set.ends = [(6, Bounce.PREEMPTED), (0, Bounce.KV_LOAD_FAILED), (9, Bounce.PREEMPTED)]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    status, stream = await events(stack, "/v1/completions", {**ASK, **options})
    usage = stream.pop()["usage"]
    choices = [event["choices"][0] for event in stream]
    assert status == 200
    assert "".join(choice["text"] for choice in choices) == PROMPT
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"]
    assert usage["completion_tokens"] == usage["prompt_tokens"] + 1
    assert carried(stack.decode[0]) == [0, 6, 6, 15]


async def test_chat_stream_goes_on_after_a_bounce(stack: Stack) -> None:
    """One assistant message, its role once, equal to the unbroken one."""
    ask_chat = {"model": "pico", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 60}
    _, unbroken = await events(stack, "/v1/chat/completions", {**ask_chat, "stream": True})
    stack.decode[0].set.ends = [(6, Bounce.PREEMPTED), (3, Bounce.LOCAL_PREFILL)]
    _, broken = await events(stack, "/v1/chat/completions", {**ask_chat, "stream": True})
    texts = []
    for stream in (unbroken, broken):
        deltas = [event["choices"][0]["delta"] for event in stream]
        assert [delta["role"] for delta in deltas if delta.get("role")] == ["assistant"]
        texts.append("".join(delta.get("content") or "" for delta in deltas))
    assert PROMPT in texts[0]
    assert texts[1] == texts[0]
    assert carried(stack.decode[0]) == [0, 0, 6, 9]


async def test_limits_hold_over_attempts(stack: Stack) -> None:
    """max_tokens counts from the first token, min_tokens reaches both legs, prefill adds one token."""
    stack.decode[0].set.ends = [(3, Bounce.PREEMPTED)]
    _, body = await ask(stack, max_tokens=7, min_tokens=6)
    assert body["usage"]["completion_tokens"] == 7
    assert body["choices"][0]["finish_reason"] == "length"
    prefill, decode = stack.prefill_leg().sampling_params, stack.decode_leg().sampling_params
    assert (prefill.max_tokens, prefill.min_tokens) == (4, 4)
    assert (decode.max_tokens, decode.min_tokens) == (7, 6)


async def test_stop_string_over_two_attempts(stack: Stack) -> None:
    """Its first token came with one attempt, its last with the next; it ends the last attempt's legs."""
    stack.decode[0].set.ends = [(6, Bounce.PREEMPTED)]
    stack.decode[0].set.step_s = 0.05
    ids = (await stack.http.post("/tokenize", json={"model": "pico", "prompt": PROMPT})).json()["tokens"]
    spelled = await stack.http.post("/detokenize", json={"model": "pico", "tokens": ids[5:7]})
    stop = spelled.json()["prompt"].strip()
    _, body = await ask(stack, stop=[stop])
    assert body["choices"][0]["text"] == PROMPT[: PROMPT.index(stop)]
    assert body["choices"][0]["stop_reason"] == stop
    await until(lambda: stack.decode_leg().request_id in stack.decode[0].aborted, "decode is told")
    await nothing_is_left(stack)


async def test_prompt_logprobs_and_cached_tokens_come_once(start: Any) -> None:
    """From the attempt whose tokens were the first to go out; later prefills are not asked for them."""
    stack: Stack = await start("--enable-prompt-tokens-details", "--hand-off", "off")
    _, unbroken = await ask(stack, prompt_logprobs=1)
    stack.decode[0].set.ends = [(0, Bounce.PREEMPTED), (6, Bounce.PREEMPTED)]
    _, body = await ask(stack, prompt_logprobs=1)
    assert body["choices"] == unbroken["choices"]
    assert body["usage"] == unbroken["usage"]
    asked = [leg.request.sampling_params.prompt_logprobs for leg in stack.prefill[0].legs]
    assert asked == [1, 1, 1, None]


async def test_one_bounced_choice_of_three(stack: Stack) -> None:
    """Its siblings do not notice: each choice has attempts of its own."""
    stack.decode[0].set.ends = [(6, Bounce.PREEMPTED)]
    status, body = await ask(stack, n=3, temperature=1)
    assert status == 200
    assert [choice["text"] for choice in body["choices"]] == [PROMPT] * 3
    assert attempts(stack) == {"first": 3, "preempted": 1}
    await nothing_is_left(stack)


async def test_both_nodes_are_told_of_a_dead_attempt_and_no_id_is_used_twice(stack: Stack) -> None:
    """Prefill may still hold the blocks of a push; the new attempt has an id and a token of its own."""
    stack.decode[0].set.ends = [(6, Bounce.PREEMPTED)]
    await ask(stack)
    first, second = (leg.request for leg in stack.decode[0].legs)
    assert (first.request_id[-3:], second.request_id[-3:]) == ("-t1", "-t2")
    await until(lambda: first.request_id in stack.prefill[0].aborted, "prefill is told")
    await until(lambda: first.request_id in stack.decode[0].aborted, "decode is told")
    sent = [leg.sampling_params.extra_args["kv_transfer_params"] for leg in (first, second)]
    assert sent[0]["lockstep_token"] != sent[1]["lockstep_token"]


async def test_late_outputs_of_a_dead_attempt_are_dropped(start: Any) -> None:
    """Prefill dies after it has pushed, and decode goes on with the attempt that was given up."""
    stack = await two_pairs(start)
    for node in stack.decode:
        node.set.pause_after_tokens, node.set.ignores_aborts = 0, True
    asking = asyncio.create_task(ask(stack))
    await until(lambda: any(n.legs and not n.running for n in stack.prefill), "prefill is done")
    (used,) = [node for node in stack.prefill if node.legs]
    await used.stop()
    await until(lambda: sum(len(node.legs) for node in stack.decode) == 2, "the next attempt is sent")
    for node in stack.decode:
        node.set.go.set()
    status, body = await asking
    assert (status, body["choices"][0]["text"]) == (200, PROMPT)
    assert attempts(stack) == {"first": 1, "prefill_lost": 1}
    await nothing_is_left(stack)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("error", [draining(), UnavailableError("this node is not ready")])
async def test_refused_leg_goes_to_another_node(start: Any, role: str, error: LockstepError) -> None:
    """Whichever side refuses for now: the other leg is taken back, and the client sees nothing of it."""
    stack = await two_pairs(start)
    nodes: list[FakeNode] = stack.prefill if role == "prefill" else stack.decode
    for node in nodes:
        node.set.fail_with = error
    nodes[0].set.fail_first = 99
    for _ in range(2):
        status, body = await ask(stack)
        assert (status, body["choices"][0]["text"]) == (200, PROMPT)
    assert len(nodes[1].legs) == 2
    assert attempts(stack) == {"first": 2, "refused": len(nodes[0].refused)}
    assert len(nodes[0].refused) == 1 or not isinstance(error, type(draining()))
    await nothing_is_left(stack)


@pytest.mark.parametrize(
    ("reason", "name"), [(FinishReason.ABORT, "prefill_lost"), (FinishReason.ERROR, "prefill_failed")]
)
async def test_failed_prefill_is_tried_elsewhere(start: Any, reason: FinishReason, name: str) -> None:
    """Another rank may not share what made it fail."""
    stack = await two_pairs(start)
    for node in stack.prefill:
        node.set.ends = [(0, reason)]
    status, body = await ask(stack)
    assert (status, body["choices"][0]["text"]) == (200, PROMPT)
    assert [len(node.legs) for node in stack.prefill] == [1, 1] or attempts(stack)[name] == 2
    await nothing_is_left(stack)


async def test_decode_engine_that_is_stopped_in_mid_stream(start: Any) -> None:
    """It aborts what it has before its node is lost: the answer goes on at the other node, unbroken."""
    stack = await two_pairs(start)
    for node in stack.decode:
        node.set.ends = [(3, FinishReason.ABORT)]
    status, body = await ask(stack)
    assert (status, body["choices"][0]["text"]) == (200, PROMPT)
    assert attempts(stack)["decode_lost"] >= 1
    await nothing_is_left(stack)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_node_lost_before_the_first_token(start: Any, role: str, stream: bool) -> None:
    """While prefill computes: the request goes to the other node, and the answer is whole."""
    stack = await two_pairs(start)
    for node in stack.prefill:
        node.set.pause_after_tokens = 0
    sending = completion_events(stack, ASK) if stream else None
    asking = asyncio.create_task(anext(sending) if sending else ask(stack))  # type: ignore[arg-type]
    nodes: list[FakeNode] = stack.prefill if role == "prefill" else stack.decode
    await until(lambda: any(n.running for n in nodes), "the leg arrives")
    await next(node for node in nodes if node.running).stop()
    await until(lambda: sum(len(node.legs) for node in nodes) == 2, "the next attempt is sent")
    for node in stack.prefill:
        node.set.go.set()
    if sending:
        text = (await asking)["choices"][0]["text"]
        text += "".join([event["choices"][0]["text"] async for event in sending])
        assert text == PROMPT
    else:
        assert (await asking)[1]["choices"][0]["text"] == PROMPT
    assert attempts(stack) == {"first": 1, f"{role}_lost": 1}
    await nothing_is_left(stack)


@pytest.mark.parametrize("how", ["stop", "hang_up"])
async def test_decode_lost_in_mid_stream(start: Any, how: str) -> None:
    """The process dies, or only its stream breaks: the other node goes on where the client's text ends."""
    stack = await two_pairs(start)
    for node in stack.decode:
        node.set.pause_after_tokens = 6
    stream = completion_events(stack, ASK)
    text = (await anext(stream))["choices"][0]["text"]
    (used,) = [node for node in stack.decode if node.legs]
    await until(lambda: used.running and stack.client.flow.num_in_flight, "it has stopped at six tokens")
    for node in stack.decode:
        if node is not used:
            node.set.go.set()
    if how == "stop":
        await used.stop()
    else:
        used.hang_up()
    text += "".join([event["choices"][0]["text"] async for event in stream])
    assert text == PROMPT
    (other,) = [node for node in stack.decode if node is not used]
    assert carried(other)[-1] in (3, 6)
    assert attempts(stack) == {"first": 1, "decode_lost": 1}
    await nothing_is_left(stack)
