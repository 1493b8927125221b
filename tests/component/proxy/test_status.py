"""The status route and the proxy's metrics, over the wire from fake nodes."""

import asyncio
import time
from typing import Any

import msgspec
from component.proxy.conftest import Start
from component.proxy.fake_node import FakeNode, Wire
from component.proxy.stack import PICO, Stack, until
from prometheus_client.parser import text_string_to_metric_families

from lockstep.rpc.generated import lockstep_pb2 as pb
from lockstep.status import NodeDocument, StatusDocument
from proxy.status import NODE_TIMEOUT_S

ASK: dict[str, Any] = {"model": "pico", "prompt": "Some words to say.", "max_tokens": 30}

PUSHED = pb.RankStatus(
    global_rank=0,
    load=pb.RankLoad(rank=0, num_running=1, num_waiting=2, kv_cache_usage=0.25),
    kv=pb.KVStatus(
        pushed_requests=3,
        pushed_blocks=5,
        pushed_bytes=5120,
        bytes_per_block=1024,
        events=[pb.KVEvent(kind="released", reason="aborted", count=4)],
    ),
)
STEPPED = pb.RankStatus(
    global_rank=1,
    load=pb.RankLoad(rank=1, num_running=7),
    steps=[
        pb.StepCount(mode="FULL", cause="", count=90),
        pb.StepCount(mode="NONE", cause="short_row", origin="own", count=10),
    ],
    scheduler=pb.SchedulerStatus(padded_arrivals=6, placeholder_drafts=12, bounced={"lockstep_preempted": 1}),
    step_records_dropped=2,
    draft_tokens=40,
    accepted_tokens=30,
    kv=pb.KVStatus(received_requests=3, received_blocks=5, bytes_per_block=1024, quarantined_blocks=1),
)


async def document(stack: Stack) -> StatusDocument:
    answer = await stack.http.get("/lockstep/status")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    return msgspec.json.decode(answer.content, type=StatusDocument)


async def sample(stack: Stack, name: str, **labels: str) -> float:
    text = (await stack.http.get("/metrics")).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def nodes(status: StatusDocument) -> tuple[NodeDocument, NodeDocument]:
    prefill, decode = status.nodes
    return prefill, decode


async def test_what_the_nodes_count_is_passed_on(stack: Stack) -> None:
    """Each rank with its load, steps, drafts and KV; bytes received are blocks times their size."""
    stack.prefill[0].status = {"num_sessions": 2, "ranks": [PUSHED]}
    stack.decode[0].status = {"num_sessions": 1, "ranks": [pb.RankStatus(global_rank=0), STEPPED]}
    prefill, decode = nodes(await document(stack))
    assert (prefill.answer, prefill.sessions, prefill.counts_age_s) == ("ok", 2, 0.5)
    pushed = prefill.ranks[0].counts
    assert pushed is not None
    assert (pushed.running_requests, pushed.waiting_requests, pushed.kv_cache_usage_ratio) == (1, 2, 0.25)
    assert (pushed.kv.pushed_requests, pushed.kv.pushed_blocks, pushed.kv.pushed_bytes) == (3, 5, 5120)
    assert [(e.kind, e.reason, e.count) for e in pushed.kv.events] == [("released", "aborted", 4)]
    idle, busy = (rank.counts for rank in decode.ranks)
    assert idle is not None
    assert busy is not None
    assert (idle.running_requests, busy.running_requests) == (0, 7)
    steps = [(step.mode, step.cause, step.origin, step.count) for step in busy.steps]
    assert steps == [("FULL", "", "", 90), ("NONE", "short_row", "own", 10)]
    assert idle.scheduler is None
    assert busy.scheduler is not None
    assert (busy.scheduler.padded_arrivals, busy.scheduler.placeholder_drafts) == (6, 12)
    assert busy.scheduler.bounced_by_reason == {"lockstep_preempted": 1}
    assert (busy.dropped_step_records, busy.draft_tokens, busy.accepted_tokens) == (2, 40, 30)
    assert (busy.kv.received_blocks, busy.kv.received_bytes, busy.kv.quarantined_blocks) == (5, 5120, 1)


async def test_what_the_nodes_describe(stack: Stack) -> None:
    """Addresses, roles, what they serve and their ranks; one compatibility group, the served one."""
    status = await document(stack)
    prefill, decode = nodes(status)
    assert (prefill.address, prefill.role, prefill.state) == (stack.prefill[0].address, "prefill", "live")
    assert (decode.address, decode.role, decode.state) == (stack.decode[0].address, "decode", "live")
    assert decode.instance_id == stack.decode[0].description().instance_id
    served = decode.description
    assert served is not None
    assert (served.model, served.num_speculative_tokens, served.block_size_tokens) == (PICO, 2, 16)
    assert (served.served_context_limit_tokens, served.versions.vllm) == (256, "0.32.0")
    assert [(r.global_rank, r.engine_id, r.kv_blocks) for r in decode.ranks] == [
        (0, "decode-1_dp0", 100),
        (1, "decode-1_dp1", 100),
    ]
    (group,) = status.compatibility_groups
    assert (group.served, group.prefill, group.decode) == (True, [prefill.address], [decode.address])
    assert group.key["block_size"] == 16
    assert prefill.compatibility_group == decode.compatibility_group == group.number
    assert (status.proxy.ready, status.proxy.served_models) == (True, ["pico"])
    assert status.proxy.served_context_limit_tokens == 256


async def test_requests_in_flight_and_queued(start: Start) -> None:
    """One runs on both sides, its prompt outstanding on prefill; the next waits for the window."""
    stack = await start("--prefill-window-tokens", "1")
    stack.prefill[0].set.pause_after_tokens = 0
    asking = [asyncio.create_task(stack.http.post("/v1/completions", json=ASK)) for _ in range(2)]
    await until(lambda: stack.client.flow.num_queued == 1 and stack.prefill[0].running, "one of two waits")
    status = await document(stack)
    prefill, decode = nodes(status)
    assert (status.proxy.in_flight_requests, status.proxy.queued_requests) == (2, 1)
    prompt_tokens = len(stack.prefill_leg().prompt_token_ids)
    (rank,) = prefill.ranks
    assert (rank.in_flight_requests, rank.outstanding_prompt_tokens, rank.window_tokens) == (
        1,
        prompt_tokens,
        1,
    )
    assert sorted(rank.in_flight_requests for rank in decode.ranks) == [0, 1]
    assert await sample(stack, "lockstep_proxy_requests_queued") == 1
    stack.prefill[0].set.go.set()
    await asyncio.gather(*asking)


async def test_a_node_that_does_not_answer_is_marked(start: Start) -> None:
    """The answer comes in time and has what the others say; the node's description stays."""
    wire = Wire()
    decode = [FakeNode("decode", wire, PICO) for _ in range(2)]
    stack = await start(prefill=[FakeNode("prefill", wire, PICO)], decode=decode)
    await until(lambda: len(list(stack.cluster.live("decode"))) == 2, "both decode nodes connect")
    decode[0].set.status_never = True
    began_s = time.monotonic()
    prefill, silent, other = (await document(stack)).nodes
    assert time.monotonic() - began_s < NODE_TIMEOUT_S + 2
    assert (silent.state, silent.answer, silent.answer_reason) == ("live", "no answer", "not within 2 s")
    assert silent.description is not None
    assert [rank.counts for rank in silent.ranks] == [None]
    assert (prefill.answer, other.answer) == ("ok", "ok")


async def test_a_node_that_is_away_is_not_asked(stack: Stack) -> None:
    """It keeps its place, says why, and what it last described stays."""
    await stack.decode[0].stop()
    await until(lambda: not stack.cluster.pair(), "the proxy notices")
    status = await document(stack)
    _, decode = nodes(status)
    assert (decode.state, decode.answer) == ("away", "not asked")
    assert decode.reason
    assert [rank.counts for rank in decode.ranks] == [None, None]
    assert not status.proxy.ready
    assert decode.address in status.proxy.not_ready_because


async def test_nodes_of_other_keys_are_told_apart(start: Start) -> None:
    """One that fits nobody is refused with the field; a pair of another model stands aside, in a group."""
    wire = Wire()
    prefill = [FakeNode("prefill", wire, PICO), FakeNode("prefill", wire, "other")]
    decode = [
        FakeNode("decode", wire, PICO),
        FakeNode("decode", wire, "other"),
        FakeNode("decode", wire, PICO, block_size=32),
    ]
    late = [prefill[1], *decode[1:]]  # the first pair is the served one
    for node in late:
        node.set.ready = False
    stack = await start(prefill=prefill, decode=decode)
    for node in late:
        node.set.ready = True
    await until(lambda: all(e.node for e in stack.cluster.listed()), "all are connected")
    status = await document(stack)
    states = {node.address: (node.state, node.reason) for node in status.nodes}
    assert states[prefill[0].address] == states[decode[0].address] == ("live", "")
    assert states[decode[1].address][0] == "aside"
    assert states[decode[2].address][0] == "refused"
    assert "block_size is 32" in states[decode[2].address][1]
    groups = {tuple(group.prefill + group.decode): group.served for group in status.compatibility_groups}
    assert groups == {
        (prefill[0].address, decode[0].address): True,
        (prefill[1].address, decode[1].address): False,
        (decode[2].address,): False,
    }


async def test_ends_attempts_and_first_tokens_are_counted(stack: Stack) -> None:
    """By outcome, in the document and beside vLLM's metrics; a refused leg is an attempt without a token."""
    for _ in range(3):
        assert (await stack.http.post("/v1/completions", json=ASK)).status_code == 200
    assert (await stack.http.post("/v1/completions", json=ASK | {"max_tokens": 2})).status_code == 200
    assert (await stack.http.post("/v1/completions", json=ASK | {"n": 2})).status_code == 200
    stack.prefill[0].set.fail_first = 1
    assert (await stack.http.post("/v1/completions", json=ASK)).status_code == 400
    proxy = (await document(stack)).proxy
    ended = {"stop": 5, "length": 1, "InvalidRequestError": 1}
    assert {outcome: n for outcome, n in proxy.requests_by_outcome.items() if n} == ended
    assert {reason: n for reason, n in proxy.attempts_by_reason.items() if n} == {"first": 7}
    assert proxy.ttft_count == 6
    assert 0 < proxy.ttft_sum_s < 60
    for outcome, n in ended.items():
        assert await sample(stack, "lockstep_proxy_requests_total", outcome=outcome) == n
    assert await sample(stack, "lockstep_proxy_requests_total") == 7
    assert await sample(stack, "lockstep_proxy_attempts_total", reason="first") == 7
    assert await sample(stack, "lockstep_proxy_ttft_seconds_count") == 6
    assert await sample(stack, "vllm:request_success_total") > 0


async def test_time_to_first_token_has_the_wait_for_the_nodes(stack: Stack) -> None:
    """Measured from arrival to the first token, not to the end."""
    stack.prefill[0].set.delay_s = 0.2
    stack.decode[0].set.step_s = 0.1
    assert (await stack.http.post("/v1/completions", json=ASK)).status_code == 200
    ttft_s = (await document(stack)).proxy.ttft_sum_s
    e2e_s = await sample(stack, "vllm:e2e_request_latency_seconds_sum")
    assert 0.2 <= ttft_s <= e2e_s - 0.1
