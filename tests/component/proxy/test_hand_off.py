"""Hand-off: prefill's token is the client's first one, and decode goes on after it.

The fake nodes answer as the legs say: with the promise on both, prefill samples the answer's next token and
decode begins after it.
"""

import asyncio
import json
from typing import Any

import pytest
from component.proxy.fake_legs import CACHED_TOKENS
from component.proxy.stack import Stack, events, until
from component.proxy.test_attempts import ASK, PROMPT, ask, attempts, carried, nothing_is_left
from vllm.v1.engine import FinishReason

from lockstep.bounce import Bounce


def hand_offs(stack: Stack) -> dict[str, int]:
    """First tokens by what became of them, without the zeros."""
    counted = stack.client.flow.metrics.hand_offs.collect()[0].samples
    return {s.labels["outcome"]: int(s.value) for s in counted if s.name.endswith("_total") and s.value}


def early(stack: Stack) -> int:
    """Tokens passed on before their prefill leg ended."""
    return int(stack.client.flow.metrics.early_first_tokens.collect()[0].samples[0].value)


async def test_first_token_goes_out_before_decode_has_any(stack: Stack) -> None:
    """While decode still waits for the KV."""
    stack.decode[0].set.pause_after_tokens = 0
    async with stack.http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as answer:
        lines = (line async for line in answer.aiter_lines() if line.startswith("data: {"))
        assert '"text":"The"' in await asyncio.wait_for(anext(lines), 5)
        assert hand_offs(stack) == {"passed_on": 1}
        stack.decode[0].set.go.set()
        rest = [line async for line in lines]
    assert rest
    await nothing_is_left(stack)


@pytest.mark.parametrize(("mode", "outcome"), [("on", "passed_on"), ("off", "off")])
async def test_answer_is_the_same_with_and_without(start: Any, mode: str, outcome: str) -> None:
    """Text, usage, prompt logprobs and cached tokens."""
    stack: Stack = await start("--enable-prompt-tokens-details", "--hand-off", mode)
    _, body = await ask(stack, prompt_logprobs=1)
    assert hand_offs(stack) == {outcome: 1}
    (choice,), usage = body["choices"], body["usage"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "stop")
    assert len(choice["prompt_logprobs"]) == usage["prompt_tokens"]
    assert usage["completion_tokens"] == usage["prompt_tokens"] + 1
    assert usage["prompt_tokens_details"]["cached_tokens"] == CACHED_TOKENS


async def test_answer_that_ends_with_its_first_token(stack: Stack) -> None:
    """Decode is told to stop, and so is prefill, which may hold the blocks of the push."""
    stack.decode[0].set.delay_s = 60
    status, body = await ask(stack, max_tokens=1)
    assert (status, body["choices"][0]["finish_reason"]) == (200, "length")
    assert body["usage"]["completion_tokens"] == 1
    leg = stack.decode_leg().request_id
    await until(lambda: leg in stack.decode[0].aborted, "decode is told")
    await until(lambda: leg in stack.prefill[0].aborted, "prefill is told")
    await nothing_is_left(stack)


async def test_stop_token_first(stack: Stack) -> None:
    """The stop reason is the token, as decode would have said."""
    ids = (await stack.http.post("/tokenize", json={"model": "pico", "prompt": PROMPT})).json()["tokens"]
    _, body = await ask(stack, stop_token_ids=[ids[0]])
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == ("stop", ids[0])


async def test_request_with_a_seed_gets_every_token_from_decode(stack: Stack) -> None:
    """Neither leg is promised anything; greedy sampling draws nothing, so there a seed does not matter."""
    _, body = await ask(stack, seed=1, temperature=1)
    assert body["choices"][0]["text"] == PROMPT
    assert hand_offs(stack) == {"seed": 1}
    assert "lockstep_hand_off" not in stack.decode_leg().sampling_params.extra_args["kv_transfer_params"]
    await ask(stack, seed=1)
    assert hand_offs(stack) == {"seed": 1, "passed_on": 1}


async def test_prefill_is_asked_for_the_first_tokens_logprobs(stack: Stack) -> None:
    """As the client asked."""
    await ask(stack, logprobs=3)
    assert stack.prefill_leg().sampling_params.logprobs == 3


@pytest.mark.parametrize("after_tokens", [0, 6])
async def test_next_attempt_carries_the_token_that_was_passed_on(stack: Stack, after_tokens: int) -> None:
    """One from each attempt's prefill, and what decode gave; the stream has each token once."""
    stack.decode[0].set.delay_s = 0.1  # so that prefill's token is there before decode ends the attempt
    stack.decode[0].set.ends = [(after_tokens, Bounce.KV_LOAD_FAILED), (after_tokens, Bounce.PREEMPTED)]
    _, stream = await events(stack, "/v1/completions", {**ASK, "stream": True})
    assert "".join(event["choices"][0]["text"] for event in stream) == PROMPT
    each = after_tokens + 1
    assert carried(stack.prefill[0]) == carried(stack.decode[0]) == [0, each, 2 * each]
    assert sum(attempts(stack).values()) == 3
    assert hand_offs(stack) == {"passed_on": 3}
    await nothing_is_left(stack)


async def test_first_token_goes_out_before_prefill_has_made_drafts(stack: Stack) -> None:
    """While its leg still runs; the leg's end says the token again, and the stream has it once."""
    stack.prefill[0].set.pause_after_tokens = 1
    async with stack.http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as answer:
        lines = (line async for line in answer.aiter_lines() if line.startswith("data: {"))
        assert '"text":"The"' in await asyncio.wait_for(anext(lines), 5)
        assert (hand_offs(stack), early(stack)) == ({"passed_on": 1}, 1)
        stack.prefill[0].set.go.set()
        rest = [json.loads(line.removeprefix("data: ")) async for line in lines]
    assert "The" + "".join(event["choices"][0]["text"] for event in rest) == PROMPT
    assert (hand_offs(stack), early(stack)) == ({"passed_on": 1}, 1)
    await nothing_is_left(stack)


async def test_prefill_that_tells_nothing_early(stack: Stack) -> None:
    """A node of several processes: the token comes with the leg's end."""
    stack.prefill[0].set.tells_early = False
    _, body = await ask(stack)
    assert body["choices"][0]["text"] == PROMPT
    assert (hand_offs(stack), early(stack)) == ({"passed_on": 1}, 0)


@pytest.mark.parametrize("end", [FinishReason.ABORT, FinishReason.ERROR])
async def test_prefill_that_fails_after_its_token(stack: Stack, end: FinishReason) -> None:
    """The client has it, so that the next attempt carries it."""
    stack.prefill[0].set.ends = [(0, end)]
    _, stream = await events(stack, "/v1/completions", {**ASK, "stream": True})
    assert "".join(event["choices"][0]["text"] for event in stream) == PROMPT
    assert carried(stack.prefill[0]) == carried(stack.decode[0]) == [0, 1]
    assert (hand_offs(stack), early(stack)) == ({"passed_on": 2}, 2)
    await nothing_is_left(stack)


async def test_client_that_leaves_between_the_token_and_the_legs_end(stack: Stack) -> None:
    """Both legs are told."""
    stack.prefill[0].set.pause_after_tokens = 1
    async with stack.http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as answer:
        await asyncio.wait_for(anext(answer.aiter_lines()), 5)
    leg = stack.decode_leg().request_id
    for node in (stack.prefill[0], stack.decode[0]):
        await until(lambda node=node: leg in node.aborted, f"{node.role} is told")
    await nothing_is_left(stack)
