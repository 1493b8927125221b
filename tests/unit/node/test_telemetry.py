"""What a node counts of its engines, and that Status tells the same as the metrics."""

import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from decode_node.scheduler.counters import SchedulerCounters
from decode_node.scheduler.rows import Violation
from lockstep.bounce import Bounce
from lockstep.node.engine import RankStatus
from lockstep.node.metrics import NodeMetrics
from lockstep.node.sessions import ProxySession, SessionRegistry
from lockstep.node.telemetry import Telemetry
from lockstep.rpc.generated import lockstep_pb2 as pb

FULL = [0, "FULL", 3, 1, 3, 3, False, ""]
IDLE = [1, "FULL", 3, 1, 3, 3, True, ""]
BROKEN = [2, "NONE", 1, 1, 1, 1, False, "short_row"]
DRAGGED = [3, "NONE", 3, 2, 6, 6, True, "peer"]

KV = {
    "pushed_requests": 2,
    "pushed_blocks": 5,
    "pushed_bytes": 5120,
    "received_requests": 1,
    "received_blocks": 4,
    "late_notices": 1,
    "malformed_notices": 0,
    "failed": {"deadline": 3},
    "kv_bytes_per_block": 1024,
    "quarantined_blocks": 6,
    "quarantined_requests": 2,
}


@dataclass
class Engines:
    """The two ranks 2 and 3 of a group, as the second node of it sees them."""

    answers: list[list[RankStatus]]
    global_ranks: list[int] = field(default_factory=lambda: [2, 3])

    async def status(self) -> list[RankStatus]:
        return self.answers.pop(0)


def says(
    steps: list[list[Any]],
    dropped: int = 0,
    running: int = 0,
    kv: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
) -> RankStatus:
    return RankStatus(running, 0, running / 4, steps, dropped, kv or {}, scheduler or {})


async def polled(*answers: list[RankStatus], counts_steps: bool = True) -> Telemetry:
    telemetry = Telemetry(NodeMetrics(), SessionRegistry(), counts_steps)
    engines: Any = Engines(list(answers))
    while engines.answers:
        await telemetry.poll(engines)
    return telemetry


async def test_steps_add_up_by_mode_and_cause() -> None:
    """Over all polls, each rank on its own, by global rank."""
    status = (
        await polled(
            [says([FULL, FULL, BROKEN], dropped=2), says([FULL])], [says([FULL, IDLE], dropped=1), says([])]
        )
    ).status("i1")
    assert status.instance_id == "i1"
    assert [rank.global_rank for rank in status.ranks] == [2, 3]
    counts = [{(step.mode, step.cause): step.count for step in rank.steps} for rank in status.ranks]
    assert counts == [{("FULL", ""): 4, ("NONE", "short_row"): 1}, {("FULL", ""): 1}]
    assert [rank.step_records_dropped for rank in status.ranks] == [3, 0]


async def test_load_that_a_step_told_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy with no output in that step has not had it, were it only that its request was aborted."""
    registry, told = SessionRegistry(), list[pb.NodeFrame]()
    monkeypatch.setattr(registry, "broadcast", told.append)
    telemetry = Telemetry(NodeMetrics(), registry, counts_steps=False)
    engines: Any = Engines([[says([], running=1), says([])], [says([]), says([])], [says([]), says([])]])
    await telemetry.poll(engines)
    telemetry.observe(EngineCoreOutputs(engine_index=2, scheduler_stats=SchedulerStats()))
    told.clear()
    await telemetry.poll(engines)
    assert [(frame.load.rank, frame.load.num_running) for frame in told] == [(0, 0)]
    await telemetry.poll(engines)
    assert len(told) == 1


async def test_origin_says_whose_rows_broke_a_step() -> None:
    """The rank's own or a peer's; nobody's for a full graph."""
    status = (await polled([says([FULL, BROKEN, DRAGGED]), says([])])).status("i1")
    assert {(step.cause, step.origin): step.count for step in status.ranks[0].steps} == {
        ("", ""): 1,
        ("short_row", "own"): 1,
        ("peer", "peer"): 1,
    }


async def test_a_cause_is_logged_the_first_time_on_each_rank(caplog: pytest.LogCaptureFixture) -> None:
    """With the rank, the cause and the step's shape; the next ones are only counted."""
    with caplog.at_level("WARNING", "lockstep.node.telemetry"):
        await polled([says([FULL, BROKEN, BROKEN]), says([BROKEN])], [says([BROKEN, DRAGGED]), says([])])
    begins = "left the full graph for the first time because of"
    assert [record.getMessage() for record in caplog.records] == [
        f"decode rank 2 {begins} short_row (its own rows): step 2, mode NONE, 1 row(s) of up to 1 tokens, "
        "1 tokens padded to 1",
        f"decode rank 3 {begins} short_row (its own rows): step 2, mode NONE, 1 row(s) of up to 1 tokens, "
        "1 tokens padded to 1",
        f"decode rank 2 {begins} peer (a peer): step 3, mode NONE, 2 row(s) of up to 3 tokens, "
        "6 tokens padded to 6, idle",
    ]


def scheduler_counts(padded: int, **by_label: dict[str, int]) -> dict[str, Any]:
    counters = SchedulerCounters()
    counters.padded_arrivals, counters.placeholder_drafts, counters.reentries = padded, 2 * padded, 1
    counters.hand_offs, counters.handed_over_drafts = 3 * padded, 4 * padded
    counters.bounced.update({Bounce(reason): n for reason, n in by_label.get("bounced", {}).items()})
    counters.violations.update({Violation(cause): n for cause, n in by_label.get("violations", {}).items()})
    return counters.snapshot()


async def test_what_the_scheduler_counts_is_told() -> None:
    """Its totals, by rank, over all polls; what it names the metrics and the status know."""
    first = scheduler_counts(3, bounced={"lockstep_preempted": 1})
    second = scheduler_counts(
        5, bounced={"lockstep_preempted": 4, "lockstep_local_prefill": 1}, violations={"short_drafts": 2}
    )
    status = (
        await polled([says([], scheduler=first), says([])], [says([], scheduler=second), says([])])
    ).status("i1")
    assert status.ranks[0].scheduler == pb.SchedulerStatus(
        hand_offs=15,
        handed_over_drafts=20,
        padded_arrivals=5,
        placeholder_drafts=10,
        reentries=1,
        bounced={"lockstep_preempted": 4, "lockstep_local_prefill": 1},
        violations={"short_drafts": 2},
    )
    assert not status.ranks[1].HasField("scheduler")


async def test_what_the_warm_up_did_is_not_told() -> None:
    """Its rows are padded arrivals too, but no client's."""
    telemetry = Telemetry(NodeMetrics(), SessionRegistry(), counts_steps=True)
    warm = says([BROKEN], scheduler=scheduler_counts(2))
    later = says([FULL], scheduler=scheduler_counts(3))
    engines: Any = Engines([[warm, warm], [later, says([FULL], scheduler=scheduler_counts(2))]])
    await telemetry.skip(engines)
    await telemetry.poll(engines)
    ranks = telemetry.status("i1").ranks
    assert [rank.scheduler.padded_arrivals for rank in ranks] == [1, 0]
    assert [len(rank.steps) for rank in ranks] == [1, 1]
    assert ranks[0].steps[0].mode == "FULL"


def test_all_that_the_scheduler_counts_is_told() -> None:
    """A new counter there would otherwise be lost, silently."""
    told = {field.name for field in pb.SchedulerStatus.DESCRIPTOR.fields}
    assert told == set(SchedulerCounters().snapshot())


async def test_prefill_steps_are_no_decode_steps() -> None:
    """They would look like a decode group out of its full graph."""
    status = (await polled([says([BROKEN]), says([])], counts_steps=False)).status("i1")
    assert not status.ranks[0].steps


async def test_load_is_that_of_the_last_poll_and_its_age_is_told() -> None:
    """A load is no total."""
    status = (await polled([says([], running=3), says([])], [says([], running=1), says([])])).status("i1")
    assert status.ranks[0].load == pb.RankLoad(rank=0, num_running=1, kv_cache_usage=0.25)
    assert status.ranks[1].load == pb.RankLoad(rank=1)
    assert 0 <= status.age_s < 60


async def test_kv_counters_become_fields_and_events() -> None:
    """Plain totals and gauges have fields; what has a reason or went wrong is an event, if it happened."""
    kv = (
        await polled([says([], kv=KV | {"pushed_bytes": 1}), says([])], [says([], kv=KV), says([])])
    ).status("i")
    assert kv.ranks[0].kv == pb.KVStatus(
        pushed_requests=2,
        pushed_blocks=5,
        pushed_bytes=5120,
        received_requests=1,
        received_blocks=4,
        events=[
            pb.KVEvent(kind="failed", reason="deadline", count=3),
            pb.KVEvent(kind="late_notices", reason="", count=1),
        ],
        bytes_per_block=1024,
        quarantined_blocks=6,
        quarantined_requests=2,
    )
    assert kv.ranks[1].kv == pb.KVStatus()


async def test_drafts_are_counted_as_the_steps_come() -> None:
    """By the global rank that the outputs carry."""
    telemetry = await polled([says([]), says([])])
    drafts = SpecDecodingStats.new(2)
    drafts.observe_draft(num_draft_tokens=2, num_accepted_tokens=1)
    outputs = EngineCoreOutputs(engine_index=3, scheduler_stats=SchedulerStats(spec_decoding_stats=drafts))
    for _ in range(2):
        telemetry.observe(outputs)
    counted = [(rank.draft_tokens, rank.accepted_tokens) for rank in telemetry.status("i1").ranks]
    assert counted == [(0, 0), (4, 2)]


async def test_sessions_are_those_open_now() -> None:
    """Not those of the last poll."""
    registry = SessionRegistry()
    telemetry = Telemetry(NodeMetrics(), registry, counts_steps=True)
    registry.open(ProxySession("p1"))
    registry.open(ProxySession("p2"))
    assert telemetry.status("i1").num_sessions == 2


async def test_node_that_may_exit_holds_no_kv() -> None:
    """As read after the last request ended, whatever was read before."""
    telemetry = await polled([says([], running=1)], [says([])])
    assert not telemetry.holds_kv(since_s=0.0)
    assert telemetry.holds_kv(since_s=time.monotonic())
    telemetry = await polled([says([])], [says([], running=1)])
    assert telemetry.holds_kv(since_s=0.0)


async def test_group_that_steps_needs_its_node() -> None:
    """Idle steps too: another node has a request."""
    telemetry = await polled([says([]), says([])], [says([]), says([IDLE])])
    assert telemetry.steps(since_s=0.0)
    telemetry = await polled([says([]), says([IDLE])], [says([]), says([])])
    assert not telemetry.steps(since_s=0.0)
    assert telemetry.steps(since_s=time.monotonic())


async def test_engines_that_say_nothing_are_not_waited_for() -> None:
    """They may be frozen, and a node that drains has a deadline for its requests, not for them."""
    telemetry = await polled([says([IDLE], running=1)])
    for long_ago in (telemetry.holds_kv, telemetry.steps):
        telemetry._polled_s = time.monotonic() - 6.0
        assert not long_ago(since_s=0.0)
