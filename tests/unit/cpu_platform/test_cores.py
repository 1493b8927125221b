"""Reading the core list and choosing a rank's core."""

import os

import pytest

from decode_node.cpu_platform.cores import core_for_rank, parse_cores, pin_thread, threads_started_unpinned


def test_cores_are_read_in_order() -> None:
    """The order is the ranks' order; spaces do not matter."""
    assert parse_cores("3, 1,0") == (3, 1, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,x", "'x' is not a core id"),
        ("0,,1", "'' is not a core id"),
        ("-1", "'-1' is not a core id"),
        ("0-3", "'0-3' is not a core id"),
        ("2,2", "core 2 is listed twice"),
    ],
)
def test_a_malformed_list_is_refused_by_name(text: str, message: str) -> None:
    """The error names the variable, its value and the entry that is wrong."""
    with pytest.raises(ValueError) as error:
        parse_cores(text)
    assert message in str(error.value)
    assert f"LOCKSTEP_CPU_CORES={text!r}" in str(error.value)


def test_each_rank_gets_its_own_core() -> None:
    """Rank r runs on the r-th core of the list."""
    environ = {"LOCKSTEP_CPU_CORES": "4,2"}
    assert [core_for_rank(environ, rank, {2, 4, 5}) for rank in (0, 1)] == [4, 2]


@pytest.mark.parametrize("environ", [{}, {"LOCKSTEP_CPU_CORES": ""}])
def test_without_a_list_ranks_are_not_pinned(environ: dict[str, str]) -> None:
    """Unset and empty mean the same."""
    assert core_for_rank(environ, 0, {0}) is None


def test_a_list_too_short_for_the_ranks_is_refused() -> None:
    """A rank without a core would share one and slow all others down."""
    with pytest.raises(ValueError, match="names 2 cores, but local rank 2 needs one"):
        core_for_rank({"LOCKSTEP_CPU_CORES": "0,1"}, 2, {0, 1})


def test_a_core_that_the_process_may_not_use_is_refused() -> None:
    """In a container with cores 0 and 1 only."""
    with pytest.raises(ValueError, match=r"core 7 is not one this process may use \[0, 1\]"):
        core_for_rank({"LOCKSTEP_CPU_CORES": "7"}, 0, {0, 1})


def test_threads_started_unpinned_leaves_the_caller_pinned() -> None:
    """Inside, the thread has all cores back (threads started there inherit them); after, one again."""
    original = os.sched_getaffinity(0)
    core = min(original)
    try:
        pin_thread(core)
        with threads_started_unpinned(original):
            assert os.sched_getaffinity(0) == original
        assert os.sched_getaffinity(0) == {core}
    finally:
        os.sched_setaffinity(0, original)
