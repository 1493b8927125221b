"""Queueing in the proxy by the prefill window."""

import asyncio
from typing import Any

from component.proxy.stack import Stack, until

ASK: dict[str, Any] = {"model": "pico", "max_tokens": 5}


def ask(stack: Stack, prompt_tokens: int) -> "asyncio.Task[Any]":
    body = {**ASK, "prompt": [7] * prompt_tokens}
    return asyncio.create_task(stack.http.post("/v1/completions", json=body))


async def test_requests_wait_here_until_prefill_is_below_its_window(start: Any) -> None:
    """Two of 30 tokens fill a window of 60; the third is sent to neither side until one has been computed."""
    stack: Stack = await start("--prefill-window-tokens", "60")
    prefill, decode = stack.prefill[0], stack.decode[0]
    prefill.set.pause_after_tokens = 0
    asking = [ask(stack, 30) for _ in range(3)]
    await until(
        lambda: len(prefill.legs) == 2 and stack.client.flow.num_queued == 1, "two are sent, one waits"
    )
    await until(lambda: len(decode.legs) == 2, "decode has two")
    prefill.set.go.set()
    answers = await asyncio.gather(*asking)
    assert [answer.status_code for answer in answers] == [200] * 3
    assert len(decode.legs) == 3


async def test_prompt_larger_than_the_window_goes_when_the_rank_is_idle(start: Any) -> None:
    """Otherwise it would wait for good."""
    stack: Stack = await start("--prefill-window-tokens", "10")
    assert (await ask(stack, 100)).status_code == 200


async def test_client_that_leaves_the_queue_is_never_sent(start: Any) -> None:
    """And the one behind it moves up."""
    stack: Stack = await start("--prefill-window-tokens", "10")
    prefill = stack.prefill[0]
    prefill.set.pause_after_tokens = 0
    first = ask(stack, 20)
    await until(lambda: prefill.running, "the first is computed")
    leaver = ask(stack, 21)
    await until(lambda: stack.client.flow.num_queued == 1, "the second waits")
    last = ask(stack, 22)
    await until(lambda: stack.client.flow.num_queued == 2, "the third waits")
    leaver.cancel()
    await until(lambda: stack.client.flow.num_queued == 1, "the second is gone")
    prefill.set.go.set()
    await asyncio.gather(first, last)
    assert [len(leg.request.prompt_token_ids or ()) for leg in prefill.legs] == [20, 22]


async def test_least_outstanding_prefill_rank_is_picked(start: Any) -> None:
    """A short prompt goes to the other node while one computes a long one."""
    from component.proxy.fake_node import FakeNode, Wire
    from component.proxy.stack import PICO

    wire = Wire()
    nodes = [FakeNode("prefill", wire, PICO) for _ in range(2)]
    stack: Stack = await start(prefill=nodes, decode=[FakeNode("decode", wire, PICO)])
    await until(lambda: len(list(stack.cluster.live("prefill"))) == 2, "both connect")
    for node in nodes:
        node.set.pause_after_tokens = 0
    asking = [ask(stack, 100)]
    await until(lambda: any(node.running for node in nodes), "the long one arrives")
    asking += [ask(stack, 20), ask(stack, 20)]
    await until(lambda: sum(len(node.legs) for node in nodes) == 3, "all arrive")
    assert sorted(len(node.legs) for node in nodes) == [1, 2]
    for node in nodes:
        node.set.go.set()
    await asyncio.gather(*asking)
