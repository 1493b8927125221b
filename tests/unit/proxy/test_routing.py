"""Choice of ranks, and the window queue."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.proxy.nodes_for_tests import node

from lockstep.errors import InvalidRequestError, LockstepError, NoDecodeNodeError, NoPrefillNodeError
from proxy.routing import Asked, Ranks, decode_ranks, default_window_tokens
from proxy.routing.least_loaded import LeastLoaded
from proxy.window_queue import WindowQueue

ASKED = Asked(1)


def test_prefill_with_the_least_outstanding_tokens() -> None:
    """Tokens count, not requests."""
    nodes = [node("prefill", "a"), node("prefill", "b")]
    ranks = Ranks(1000, LeastLoaded())
    for n in nodes:
        ranks.add(n)
    first = ranks.pick_prefill(nodes, ASKED)
    begun = first.begin(300)
    second = ranks.pick_prefill(nodes, ASKED)
    assert second is not first
    second.begin(100)
    assert ranks.pick_prefill(nodes, ASKED) is second
    first.end(300, begun)
    assert ranks.pick_prefill(nodes, ASKED) is first


def test_prefill_at_its_window_is_not_picked() -> None:
    """Below the window one more goes; an idle rank takes any."""
    nodes = [node("prefill", "a")]
    ranks = Ranks(100, LeastLoaded())
    ranks.add(nodes[0])
    load = ranks.pick_prefill(nodes, ASKED)
    load.begin(99)
    assert ranks.pick_prefill(nodes, ASKED) is load
    load.begin(500)
    assert ranks.pick_prefill(nodes, ASKED) is None


def test_default_window_is_two_steps() -> None:
    """From the rank's own token budget."""
    ranks = Ranks(None, LeastLoaded())
    ranks.add(node("prefill", "a"))
    assert (
        ranks.pick_prefill([node("prefill", "a")], ASKED).window_tokens == default_window_tokens(100) == 200
    )


def test_no_rank_is_an_error_of_its_side() -> None:
    """So that the client learns which side is missing."""
    with pytest.raises(NoPrefillNodeError):
        Ranks(1, LeastLoaded()).pick_prefill([], ASKED)
    with pytest.raises(NoDecodeNodeError):
        Ranks(1, LeastLoaded()).pick_decode([], ASKED)


def test_decode_with_the_fewest_requests() -> None:
    """What the node reports, which includes other proxies, plus what was sent since."""
    n = node("decode", "d", num_ranks=2)
    ranks = Ranks(1, LeastLoaded())
    ranks.add(n)
    ranks.report("d", 0, num_running=2, num_waiting=1)
    ranks.report("d", 1, num_running=1, num_waiting=0)
    picked = []
    for _ in range(4):
        load = ranks.pick_decode([n], ASKED)
        load.begin(1)
        picked.append(load.rank.local_rank)
    assert picked == [1, 1, 0, 1]


def test_legs_that_are_over_count_no_more_without_a_report() -> None:
    """A node that sees no change reports none: answers of one token come and go between two polls."""
    ranks = Ranks(1, LeastLoaded())
    ranks.add(node("decode", "d"))
    load = ranks.of("d")[0]
    load.rank = replace(load.rank, num_kv_blocks=10)
    free = load.free_kv_tokens
    for _ in range(3):
        load.end(40, load.begin(40))
    assert (load.requests, load.free_kv_tokens) == (0, free)


def test_leg_that_ends_after_a_report_is_in_its_kv_usage() -> None:
    """The tokens of what was sent before a report are not subtracted twice."""
    ranks = Ranks(1, LeastLoaded())
    ranks.add(node("decode", "d"))
    load = ranks.of("d")[0]
    load.rank = replace(load.rank, num_kv_blocks=10)
    begun = load.begin(40)
    ranks.report("d", 0, 1, 0, kv_cache_usage=0.5)
    free = load.free_kv_tokens
    load.end(40, begun)
    assert load.free_kv_tokens == free


def test_own_requests_count_even_if_a_report_misses_them() -> None:
    """A report may have been made before the last requests arrived."""
    n = node("decode", "d", num_ranks=2)
    ranks = Ranks(1, LeastLoaded())
    ranks.add(n)
    ranks.pick_decode([n], ASKED).begin(1)
    ranks.report("d", 0, 0, 0)
    assert ranks.pick_decode([n], ASKED).rank.local_rank == 1


def test_decode_rank_by_number() -> None:
    """Groups in the order of the flags, then global ranks; refused when no rank has it, away when it is."""
    nodes = [
        node("decode", "d2", group_id="g"),
        node("decode", "e", group_id="h"),
        node("decode", "d1", group_id="g"),
    ]
    assert [n.address for n, _ in decode_ranks(nodes)] == ["d2", "d1", "e"]
    ranks = Ranks(1, LeastLoaded())
    ranks.add(nodes[1])
    assert ranks.decode_at(nodes, nodes, 2).node.address == "e"
    with pytest.raises(InvalidRequestError, match=r"data_parallel_rank 3 is out of range \[0, 3\)"):
        ranks.decode_at(nodes, nodes, 3)
    with pytest.raises(NoDecodeNodeError):
        ranks.decode_at(nodes, nodes, 0)
    with pytest.raises(NoDecodeNodeError):
        ranks.decode_at(nodes, [nodes[0]], 2)


def test_rank_that_failed_comes_after_all_others() -> None:
    """However little it has to do; of several such, the one that failed longest ago."""
    n = node("decode", "d", num_ranks=3)
    ranks = Ranks(1, LeastLoaded())
    ranks.add(n)
    ranks.report("d", 2, num_running=9, num_waiting=9)
    assert ranks.pick_decode([n], Asked(1, failed_at={("d", 0): 1, ("d", 1): 2})).rank.local_rank == 2
    assert (
        ranks.pick_decode([n], Asked(1, failed_at={("d", 0): 3, ("d", 1): 1, ("d", 2): 2})).rank.local_rank
        == 1
    )
    assert ranks.pick_decode([n], Asked(1, failed_at={("other", 0): 1})).rank.local_rank == 0


def test_failed_prefill_rank_is_better_than_none() -> None:
    """But not better than to wait for another: a broken rank has room, and would fail all attempts."""
    nodes = [node("prefill", "a"), node("prefill", "b")]
    ranks = Ranks(100, LeastLoaded())
    for n in nodes:
        ranks.add(n)
    asked = Asked(1, failed_at={("a", 0): 1})
    assert ranks.pick_prefill(nodes, asked).node.address == "b"
    ranks.of("b")[0].begin(100)
    assert ranks.pick_prefill(nodes, asked) is None
    assert ranks.pick_prefill([nodes[0]], asked).node.address == "a"


class Sender:
    """Sends while there is room; a name that starts with 'bad' cannot be served."""

    def __init__(self) -> None:
        self.room = 0
        self.sent: list[str] = []
        self.failed: list[str] = []

    def send(self, item: str) -> bool:
        if item.startswith("bad"):
            raise NoDecodeNodeError("none")
        if self.room == 0:
            return False
        self.room -= 1
        self.sent.append(item)
        return True

    def fail(self, item: str, error: LockstepError) -> None:
        self.failed.append(item)


@given(st.lists(st.integers(0, 3), max_size=30))
def test_queue_is_first_in_first_out(rooms: list[int]) -> None:
    """Whatever room comes up and when, the order of arrival is the order of sending."""
    sender = Sender()
    queue = WindowQueue(sender.send, sender.fail)
    items = [f"item{i}" for i in range(len(rooms))]
    for item, room in zip(items, rooms, strict=True):
        sender.room += room
        queue.put(item)
    assert sender.sent == items[: len(sender.sent)]
    sender.room = len(items)
    queue.pump()
    assert sender.sent == items
    assert len(queue) == 0


def test_what_was_sent_before_goes_first() -> None:
    """Ahead of all that have not been, and among themselves in order; both lanes wait and can be left."""
    sender = Sender()
    queue = WindowQueue(sender.send, sender.fail)
    for item in ("new1", "new2", "again1", "again2", "again3"):
        queue.put(item, ahead=item.startswith("again"))
    assert len(queue) == 5
    queue.discard("again2")
    sender.room = 9
    queue.pump()
    assert sender.sent == ["again1", "again3", "new1", "new2"]


def test_item_that_cannot_be_served_does_not_hold_up_the_rest() -> None:
    """It fails at the head, and the next is tried."""
    sender = Sender()
    queue = WindowQueue(sender.send, sender.fail)
    queue.put("a")
    queue.put("bad")
    queue.put("b")
    sender.room = 2
    queue.pump()
    assert (sender.sent, sender.failed) == (["a", "b"], ["bad"])


def test_thousands_that_fail_at_once_do_not_nest() -> None:
    """`fail` ends a request, which pumps again: the queue must not recurse."""
    closed = False
    failed: list[str] = []

    def send(item: str) -> bool:
        if closed:
            raise NoDecodeNodeError("none")
        return False

    def fail(item: str, error: LockstepError) -> None:
        failed.append(item)
        queue.pump()

    queue = WindowQueue(send, fail)
    items = [f"item{i}" for i in range(5000)]
    for item in items:
        queue.put(item)
    closed = True
    queue.pump()
    assert failed == items
