"""What is kept for the live page: bounded whatever comes, and whoever looks or does not."""

import asyncio
from typing import Any

import pytest
from unit.proxy.attempts_for_tests import decode_step, flight, prefill_end
from unit.proxy.nodes_for_tests import node

from lockstep.errors import UnavailableError
from lockstep.rpc.generated import lockstep_pb2 as pb
from proxy.cluster import Cluster
from proxy.flow import Flow
from proxy.live.event_stream import EventStream
from proxy.live.feed import Feed
from proxy.live.journal import KEPT_ENDED, MAX_CHANGED, Journal, choice_row
from proxy.live.lanes import KEPT_STEPS, Lanes
from proxy.live.viewers import MAX_QUEUED_FRAMES, MAX_VIEWERS, Viewers
from proxy.routing import Ranks


def records(rank: int, first: int, count: int) -> pb.StepRecords:
    steps = [pb.StepRecord(step=number, mode="FULL") for number in range(first, first + count)]
    return pb.StepRecords(rank=rank, records=steps)


def test_lane_keeps_the_last_steps() -> None:
    """Of a second with more steps than are kept, and over many seconds."""
    lanes = Lanes()
    lanes.opened(node("decode", "d", 2))
    lanes.add("d", records(0, 0, 3))
    lanes.add("d", records(1, 0, KEPT_STEPS + 10))
    lanes.add("d", records(0, 3, KEPT_STEPS))
    assert [(lane.local_rank, len(lane.steps), lane.steps[-1][0]) for lane in lanes.all()] == [
        (0, KEPT_STEPS, KEPT_STEPS + 2),
        (1, KEPT_STEPS, KEPT_STEPS + 9),
    ]


def test_new_steps_are_taken_once() -> None:
    """And a rank without new ones is left out."""
    lanes = Lanes()
    lanes.opened(node("decode", "d", 2))
    lanes.add("d", records(0, 0, 2))
    assert [[step[0] for step in lane.steps] for lane in lanes.take_new()] == [[0, 1]]
    assert lanes.take_new() == []
    lanes.add("d", records(1, 0, 1))
    assert [lane.local_rank for lane in lanes.take_new()] == [1]


def test_steps_of_an_unknown_rank_are_left_out() -> None:
    """A node that is not in the list cannot make the proxy keep anything."""
    lanes = Lanes()
    lanes.opened(node("decode", "d", 1))
    lanes.add("d", records(1, 0, 1))
    lanes.add("other", records(0, 0, 1))
    assert lanes.all() == []


def test_prefill_has_no_lanes() -> None:
    """Its steps are never uniform, which is as it should be."""
    lanes = Lanes()
    lanes.opened(node("prefill", "p", 1))
    lanes.add("p", records(0, 0, 3))
    assert lanes.all() == []


def test_a_session_that_only_reconnects_keeps_the_lanes() -> None:
    """The node is the same process and counts on."""
    lanes = Lanes()
    lanes.opened(node("decode", "d", 1))
    lanes.add("d", records(0, 0, 1))
    lanes.opened(node("decode", "d", 1))
    assert len(lanes.all()) == 1


def test_node_that_is_no_longer_listed_is_forgotten() -> None:
    """Its lanes go, those of the others stay."""
    lanes = Lanes()
    for address in ("d1", "d2"):
        lanes.opened(node("decode", address, 1))
        lanes.add(address, records(0, 0, 1))
    lanes.forget("d1")
    assert [lane.address for lane in lanes.all()] == ["d2"]
    lanes.add("d1", records(0, 1, 1))
    assert len(lanes.all()) == 1


def test_journal_keeps_few_ended_choices_and_nothing_else_unwatched() -> None:
    """No choice is held on to before it ends, so no prompt is."""
    journal = Journal()
    for _ in range(KEPT_ENDED + 5):
        journal.changed(flight())
        journal.ended(flight(), "stop")
    assert len(journal.recent()) == KEPT_ENDED
    assert journal.take_changed() == ([], 0)


def test_journal_tells_the_last_changes_and_how_many_it_left_out() -> None:
    """A choice that changes twice between two frames is told once, as it then is."""
    journal = Journal()
    journal.watched = True
    for number in range(MAX_CHANGED + 3):
        choice = flight()
        choice.choice_id = f"choice-{number}"
        journal.changed(choice)
        journal.changed(choice)
    journal.ended(choice, "stop")
    rows, left_out = journal.take_changed()
    assert (len(rows), left_out) == (MAX_CHANGED, 3)
    assert (rows[-1].id, rows[-1].outcome, rows[-2].outcome) == (choice.choice_id, "stop", "")
    assert journal.take_changed() == ([], 0)


def test_row_has_when_the_prompt_was_computed_and_when_the_kv_had_arrived() -> None:
    """With a hand-off the first token comes before the KV; the row tells the two apart."""
    choice = flight(hand_off=True)
    assert [(a.phase, a.prefilled_ms, a.arrived_ms) for a in choice_row(choice).attempts] == [
        ("dispatched", None, None)
    ]
    choice.on_output("prefill", prefill_end(), 0.0)
    row = choice_row(choice)
    assert row.ttft_ms is not None
    assert row.attempts[0].prefilled_ms is not None
    assert (row.attempts[0].phase, row.attempts[0].arrived_ms) == ("prefilled", None)
    choice.on_output("decode", decode_step(5, 6), 0.0)
    row = choice_row(choice)
    assert row.attempts[0].arrived_ms is not None
    assert (row.attempts[0].phase, row.output_tokens) == ("streaming", 3)


async def test_viewer_that_is_behind_loses_the_oldest_frames() -> None:
    """Nobody waits for it, it does not grow, and it is told how many it has lost."""
    viewers = Viewers()
    slow, quick = viewers.open(), viewers.open()
    for number in range(MAX_QUEUED_FRAMES + 7):
        viewers.send(b"%d" % number)
        assert await quick.next(1) == b"%d" % number
    assert await slow.next(1) == b"7"
    assert (slow.take_lost(), slow.take_lost(), quick.take_lost()) == (7, 0, 0)


async def test_viewer_without_frames_gets_a_heartbeat_and_then_the_end() -> None:
    """An empty frame after the time, None once all is closed; nobody opens another then."""
    viewers = Viewers()
    viewer = viewers.open()
    assert await viewer.next(0.01) == b""
    viewers.close()
    assert await viewer.next(1) is None
    with pytest.raises(UnavailableError):
        viewers.open()


def test_viewers_are_limited_in_number() -> None:
    """One that leaves makes room; nobody is there once all have left."""
    viewers = Viewers()
    opened = [viewers.open() for _ in range(MAX_VIEWERS)]
    with pytest.raises(UnavailableError):
        viewers.open()
    viewers.leave(opened.pop())
    opened.append(viewers.open())
    for viewer in opened:
        assert viewers.any.is_set()
        viewers.leave(viewer)
    assert not viewers.any.is_set()


async def test_viewer_whose_connection_takes_nothing_is_dropped() -> None:
    """After the deadline of one send; its place is free then."""

    async def no_status() -> Any:
        raise AssertionError("not asked in this test")

    feed = Feed(Flow(Cluster(["p:1"], ["d:1"]), Ranks(None), 10.0, 8), no_status)
    stream = EventStream(feed, feed.open(), send_timeout_s=0.05)

    async def never(*_: object) -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await never()

    assert feed.viewers.any.is_set()
    async with asyncio.timeout(10):
        await stream({}, never, send)
    assert not feed.viewers.any.is_set()
