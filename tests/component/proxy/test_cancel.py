"""A client that leaves, and a stop string: both legs end."""

import asyncio
from typing import Any

import httpx
import pytest
from component.proxy.stack import Stack, completion_events, until

ASK: dict[str, Any] = {"model": "pico", "prompt": "Some words to say again and again.", "max_tokens": 50}


async def test_disconnect_in_mid_stream_reaches_both_legs(stack: Stack) -> None:
    """Prefill is told too: it may still hold the blocks of a push."""
    stack.decode[0].set.pause_after_tokens = 6
    stream = completion_events(stack, ASK)
    await anext(stream)
    await stream.aclose()
    leg_id = stack.decode_leg().request_id
    await until(lambda: leg_id in stack.decode[0].aborted, "decode is aborted")
    await until(lambda: leg_id in stack.prefill[0].aborted, "prefill is aborted")
    assert not stack.front_end.output_processor.request_states


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_before_the_first_token_reaches_both_legs(stack: Stack, stream: bool) -> None:
    """While prefill computes; no answer has begun."""
    stack.prefill[0].set.pause_after_tokens = 0
    async with httpx.AsyncClient(base_url=stack.http.base_url) as leaver:
        asking = asyncio.create_task(leaver.post("/v1/completions", json={**ASK, "stream": stream}))
        await until(lambda: stack.prefill[0].running and stack.decode[0].running, "both legs arrive")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: not stack.prefill[0].running and not stack.decode[0].running, "both legs are aborted")


async def test_stop_string_ends_both_legs(stack: Stack) -> None:
    """The detokenizer finds it here, so decode has to be told; the text ends before it."""
    stack.decode[0].set.step_s = 0.2
    answer = await stack.http.post("/v1/completions", json={**ASK, "stop": [" to "]})
    choice = answer.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Some words", "stop")
    leg_id = stack.decode_leg().request_id
    await until(lambda: leg_id in stack.decode[0].aborted, "decode is aborted")
    await until(lambda: leg_id in stack.prefill[0].aborted, "prefill is told")


async def test_finished_request_is_not_aborted(stack: Stack) -> None:
    """An end by itself needs no abort on either side."""
    assert (await stack.http.post("/v1/completions", json=ASK)).status_code == 200
    assert not stack.decode[0].aborted
    assert not stack.prefill[0].aborted
