"""Attempts after failures over the wire: the budget, the wait, broken groups, and nodes that drain."""

import asyncio
from typing import Any

from component.proxy.fake_node import FakeNode, Wire
from component.proxy.stack import PICO, Stack, completion_events, until
from component.proxy.test_attempts import ASK, PROMPT, ask, attempts, nothing_is_left

from lockstep.bounce import Bounce
from lockstep.rpc.generated import lockstep_pb2 as pb

FOREVER = 1000


async def metric(stack: Stack, name: str) -> float:
    """The value of the one series that begins so."""
    text = (await stack.http.get("/metrics")).text
    (line,) = (line for line in text.splitlines() if line.startswith(name))
    return float(line.rpartition(" ")[2])


async def two_groups(start: Any, *flags: str) -> Stack:
    """Decode groups of one node each, and so many prefill nodes that each is paired with both in turn.

    Round robin goes by address; a request's first attempt goes to the first of `decode`.
    """
    wire = Wire()
    stack: Stack = await start(
        *("--hand-off", "off", "--routing-policy", "round_robin"),
        *flags,
        prefill=[FakeNode("prefill", wire, PICO, group_id=group) for group in "xyz"],
        decode=[FakeNode("decode", wire, PICO, group_id=group) for group in "ab"],
    )
    cluster = stack.cluster
    await until(lambda: len(cluster.live("prefill")) == 3 and len(cluster.live("decode")) == 2, "all connect")
    stack.decode.sort(key=lambda node: node.address)
    return stack


async def test_without_budget_a_failure_is_the_end(start: Any) -> None:
    """The client is told so; what decode asked for is tried again all the same."""
    stack = await two_groups(start, "--retry-budget-ratio", "0", "--retry-budget-min-per-s", "0.1")
    stack.decode[0].set.ends = [(6, Bounce.KV_LOAD_FAILED)]
    assert (await ask(stack))[0] == 200, "one attempt is in the budget: 0.1 a second for ten seconds"
    for node in stack.decode:
        node.set.ends = [(6, Bounce.KV_LOAD_FAILED)]
    status, body = await ask(stack)
    assert status == 503
    message = "Too many requests have to be tried again now: The KV cache did not reach the decode rank."
    assert body["error"]["message"].startswith(message)
    for node in stack.decode:
        node.set.ends = [(6, Bounce.PREEMPTED)]
    assert (await ask(stack))[0] == 200
    assert await metric(stack, 'lockstep_proxy_retries_total{decision="refused"}') == 1
    await nothing_is_left(stack)


async def test_attempts_without_a_token_wait_before_they_go_on(start: Any) -> None:
    """Until then the choice is on no node; a client that leaves meanwhile is not sent any more."""
    stack = await two_groups(start, "--retry-backoff-s", "3600", "--retry-backoff-max-s", "3600")
    for node in stack.decode:
        node.set.ends = [(0, Bounce.KV_LOAD_FAILED)] * FOREVER
    asking = asyncio.create_task(ask(stack))
    nodes = [*stack.prefill, *stack.decode]
    await until(lambda: sum(len(node.legs) for node in stack.decode) == 2, "two attempts are made")
    await until(lambda: not any(node.running for node in nodes), "both are over")
    assert stack.client.flow.num_in_flight == 1
    assert stack.client.flow.num_queued == 0
    asking.cancel()
    await until(lambda: stack.client.flow.num_in_flight == 0, "the choice is forgotten")
    await nothing_is_left(stack)


async def test_wait_ends_with_another_attempt(start: Any) -> None:
    stack = await two_groups(start, "--retry-backoff-s", "0.02")
    for node in stack.decode:
        node.set.ends = [(0, Bounce.KV_LOAD_FAILED)] * 2
    status, body = await ask(stack)
    assert (status, body["choices"][0]["text"]) == (200, PROMPT)
    assert attempts(stack) == {"first": 1, "kv_load_failed": 4}
    await nothing_is_left(stack)


async def test_group_that_keeps_failing_gets_nothing_more(start: Any) -> None:
    """Once it has failed twice in a row all go to the other one, at the first attempt."""
    stack = await two_groups(start, "--breaker-failures", "2")
    broken = stack.decode[0]
    broken.set.ends = [(0, Bounce.KV_LOAD_FAILED)] * FOREVER
    for _ in range(6):
        assert (await ask(stack))[0] == 200
    assert len(broken.legs) == 2
    assert await metric(stack, 'lockstep_proxy_breakers_open{role="decode"}') == 1
    assert await metric(stack, 'lockstep_proxy_breakers_open{role="prefill"}') == 0
    await nothing_is_left(stack)


async def test_broken_group_is_tried_again_and_used_when_it_works(start: Any) -> None:
    stack = await two_groups(start, "--breaker-failures", "1", "--breaker-open-s", "0.2")
    broken = stack.decode[0]
    broken.set.ends = [(0, Bounce.KV_LOAD_FAILED)]

    async def asked_until_it_is_used() -> None:
        while len(broken.legs) < 3:
            assert (await ask(stack))[0] == 200
            await asyncio.sleep(0.02)

    await asyncio.wait_for(asked_until_it_is_used(), 20)
    assert await metric(stack, 'lockstep_proxy_breakers_open{role="decode"}') == 0


async def test_request_does_not_go_twice_to_the_same_broken_group(start: Any) -> None:
    """Nothing else is there: the request ends when it failed with two prefill nodes, long before the cap."""
    wire = Wire()
    decode = FakeNode("decode", wire, PICO)
    prefill = [FakeNode("prefill", wire, PICO) for _ in range(4)]
    stack: Stack = await start("--breaker-failures", "1", decode=[decode], prefill=prefill)
    decode.set.ends = [(0, Bounce.KV_LOAD_FAILED)] * FOREVER
    status, body = await ask(stack)
    assert status == 503
    assert "No decode node is ready. Before that: The KV cache did not reach" in body["error"]["message"]
    assert len(decode.legs) == 2
    decode.set.ends = []
    assert (await ask(stack))[0] == 200, "another request may use it, with nothing else to turn to"
    await nothing_is_left(stack)


async def stream_on(stack: Stack, node: FakeNode) -> "asyncio.Task[str]":
    """A stream that has come to its sixth token on a decode node, and stays there."""
    node.set.pause_after_tokens = 6

    async def read() -> str:
        return "".join([event["choices"][0]["text"] async for event in completion_events(stack, ASK)])

    before = node.num_paused
    reading = asyncio.create_task(read())
    await until(lambda: node.num_paused > before, "the stream has come to the pause")
    return reading


async def paused_on_one(start: Any, *flags: str) -> tuple[Stack, FakeNode, FakeNode, "asyncio.Task[str]"]:
    """The decode node that has a stream, and the other one."""
    stack = await two_groups(start, *flags)
    left, other = stack.decode
    return stack, left, other, await stream_on(stack, left)


async def test_stream_is_moved_before_a_draining_nodes_deadline(start: Any) -> None:
    """Nothing is lost or repeated, and the node need not give it back. Half of a short time is left alone."""
    stack, left, other, reading = await paused_on_one(start, "--drain-move-s", "2.8")
    left.tell_all(pb.NodeFrame(draining=pb.Draining(deadline_s=3)))
    assert not other.legs
    assert await reading == PROMPT
    assert len(other.legs) == 1
    assert left.aborted == [left.legs[0].request.request_id]
    assert attempts(stack) == {"first": 1, "drained": 1}


async def test_stream_is_moved_at_once_if_the_node_says_so(start: Any) -> None:
    """Whatever the deadline."""
    stack, left, _, reading = await paused_on_one(start)
    left.tell_all(pb.NodeFrame(draining=pb.Draining(deadline_s=3600, move=True)))
    assert await reading == PROMPT
    assert attempts(stack) == {"first": 1, "drained": 1}


async def test_stream_ends_where_it_is_if_it_ends_in_time(start: Any) -> None:
    stack, left, other, reading = await paused_on_one(start)
    left.tell_all(pb.NodeFrame(draining=pb.Draining(deadline_s=3600)))
    await until(lambda: stack.cluster.count("decode", "away") == 1, "the proxy knows")
    left.set.go.set()
    assert await reading == PROMPT
    assert not other.legs


async def test_stream_without_another_place_stays(start: Any) -> None:
    """A node that drains is better than none."""
    stack: Stack = await start("--hand-off", "off")
    node = stack.decode[0]
    reading = await stream_on(stack, node)
    node.tell_all(pb.NodeFrame(draining=pb.Draining(deadline_s=3600, move=True)))
    await until(lambda: stack.cluster.count("decode", "away") == 1, "the proxy knows")
    node.set.go.set()
    assert await reading == PROMPT
    assert attempts(stack) == {"first": 1}


async def test_slow_prefill_is_hedged_and_the_first_goes_on(start: Any) -> None:
    """The prompt goes to another prefill rank too, whose answer it is; of the slow one nothing is left."""
    stack = await two_groups(start, "--hedge-after-s", "0.1")
    slow, fast, third = sorted(stack.prefill, key=lambda node: node.address)
    slow.set.pause_after_tokens = 0
    status, body = await ask(stack)
    assert (status, body["choices"][0]["text"]) == (200, PROMPT)
    assert [len(node.legs) for node in (slow, fast, third)] == [1, 1, 0]
    assert slow.aborted == [slow.legs[0].request.request_id]
    assert attempts(stack) == {"first": 1, "hedge": 1}
    assert await metric(stack, 'lockstep_proxy_hedges_total{won="yes"}') == 1
    await nothing_is_left(stack)


async def test_hedge_that_comes_second_is_withdrawn(start: Any) -> None:
    stack = await two_groups(start, "--hedge-after-s", "0.1")
    slow, hedge, _ = sorted(stack.prefill, key=lambda node: node.address)
    slow.set.pause_after_tokens = hedge.set.pause_after_tokens = 0
    asking = asyncio.create_task(ask(stack))
    await until(lambda: hedge.running, "the hedge is there")
    slow.set.go.set()
    status, body = await asking
    assert (status, body["choices"][0]["text"]) == (200, PROMPT)
    assert hedge.aborted == [hedge.legs[0].request.request_id]
    assert await metric(stack, 'lockstep_proxy_hedges_total{won="no"}') == 1
    await nothing_is_left(stack)


async def test_hedge_goes_on_when_the_first_attempts_node_dies(start: Any) -> None:
    """No third attempt is made."""
    stack = await two_groups(start, "--hedge-after-s", "0.1")
    slow, hedge, _ = sorted(stack.prefill, key=lambda node: node.address)
    slow.set.pause_after_tokens = hedge.set.pause_after_tokens = 0
    asking = asyncio.create_task(ask(stack))
    await until(lambda: hedge.running, "the hedge is there")
    await slow.stop()
    await until(lambda: stack.cluster.count("prefill", "live") == 2, "the proxy knows")
    hedge.set.go.set()
    status, body = await asking
    assert (status, body["choices"][0]["text"]) == (200, PROMPT)
    assert attempts(stack) == {"first": 1, "hedge": 1}


async def test_nothing_is_hedged_without_budget(start: Any) -> None:
    """Each choice earns a fifth of an attempt, and this is the first one."""
    stack = await two_groups(start, "--hedge-after-s", "0.05", "--retry-budget-min-per-s", "0")
    slow = min(stack.prefill, key=lambda node: node.address)
    slow.set.pause_after_tokens = 0
    asking = asyncio.create_task(ask(stack))
    await until(lambda: slow.running, "it is computed")
    await asyncio.sleep(0.3)
    assert attempts(stack) == {"first": 1}
    slow.set.go.set()
    assert (await asking)[0] == 200
