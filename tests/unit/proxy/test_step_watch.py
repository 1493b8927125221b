"""Which ranks stand still though they have work."""

from unit.proxy.nodes_for_tests import node

from lockstep.rpc.generated import lockstep_pb2 as pb
from proxy.routing import RankKey
from proxy.step_watch import StepWatch

RECORDS = pb.EngineSettings(records_steps=True)


def watch(records: bool = True) -> StepWatch:
    """Of a node with two ranks, whose session opened at 100 s; 4 s are frozen."""
    watched = StepWatch(4.0)
    watched.opened(
        node("decode", "d", num_ranks=2, engine=RECORDS if records else pb.EngineSettings()), 100.0
    )
    return watched


def frozen(watched: StepWatch, until_s: float, streaming: set[RankKey] | None = None) -> list[int]:
    """Checked each second up to a time, as the proxy does; the frozen local ranks at the end."""
    found: dict[RankKey, float] = {}
    now_s = watched._checked_s or 100.0
    while now_s < until_s:
        now_s += 1.0
        found = watched.frozen(streaming or set(), now_s)
    return [rank for _, rank in found]


def test_idle_ranks_are_not_frozen() -> None:
    """An engine without work makes no steps."""
    assert frozen(watch(), 200.0) == []


def test_rank_with_running_requests_and_without_steps_is_frozen() -> None:
    """Other proxies' requests count: the node reports them. A step is what keeps it well."""
    watched = watch()
    watched.reported("d", 1, 2, 101.0)
    watched.reported("d", 0, 2, 101.0)
    assert frozen(watched, 104.0) == []
    watched.stepped("d", 0, 104.0)
    assert frozen(watched, 106.0) == [1]
    watched.stepped("d", 1, 106.5)
    assert frozen(watched, 108.0) == []


def test_work_counts_from_when_it_came() -> None:
    """A rank that idled for an hour has a first step to make."""
    watched = watch()
    frozen(watched, 200.0)
    watched.reported("d", 0, 1, 200.0)
    assert frozen(watched, 204.0) == []
    assert frozen(watched, 205.0) == [0]


def test_finished_work_is_none() -> None:
    """The node tells every change of its load."""
    watched = watch()
    watched.reported("d", 0, 1, 101.0)
    watched.reported("d", 0, 0, 103.0)
    assert frozen(watched, 200.0) == []


def test_without_step_records_only_own_streams_count() -> None:
    """Of the steps for other proxies' requests nothing is heard."""
    watched = watch(records=False)
    watched.reported("d", 0, 1, 101.0)
    assert frozen(watched, 150.0) == []
    assert frozen(watched, 151.0, {("d", 0)}) == [0]


def test_frozen_until_it_is_heard_of() -> None:
    """Its streams may have moved away: it has no work then that is known here, and is no better for it."""
    watched = watch(records=False)
    assert frozen(watched, 105.0, {("d", 1)}) == [1]
    assert frozen(watched, 150.0) == [1]
    watched.reported("d", 1, 0, 150.0)
    assert frozen(watched, 151.0) == []


def test_time_in_which_the_proxy_stood_still_does_not_count() -> None:
    """Its frames wait in the socket meanwhile."""
    watched = watch()
    watched.reported("d", 0, 1, 100.5)
    assert frozen(watched, 102.0) == []
    assert watched.frozen(set(), 160.0) == {}
    assert frozen(watched, 162.0) == []
    assert frozen(watched, 165.0) == [0]


def test_node_that_comes_back_starts_anew() -> None:
    """As a new session says."""
    watched = watch()
    watched.reported("d", 0, 1, 100.0)
    assert frozen(watched, 105.0) == [0]
    watched.closed("d")
    assert frozen(watched, 106.0) == []
    watched.opened(node("decode", "d", engine=RECORDS), 106.0)
    assert frozen(watched, 200.0) == []
