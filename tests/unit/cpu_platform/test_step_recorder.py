"""Causes, ring and runner hook of the step recorder, on numbers alone."""

from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np
import pytest

from decode_node.step_recorder import Cause, StepRecorderMixin, StepRing, StepShape, step_cause

QUERY_LEN = 3
LARGEST_GRAPH = 12


def shape(*widths: int) -> StepShape:
    return StepShape(len(widths), min(widths), max(widths), sum(widths))


@pytest.mark.parametrize(
    ("widths", "full_alone", "expected"),
    [
        ((3, 3), True, Cause.PEER),
        ((3, 1), False, Cause.SHORT_ROW),
        ((1,), False, Cause.SHORT_ROW),
        ((40,), False, Cause.LONG_ROW),
        ((40, 3), False, Cause.LONG_ROW),
        ((40, 1), False, Cause.LONG_ROW),
        ((3,) * 5, False, Cause.OVERSIZED),
    ],
)
def test_cause_of_a_step_without_a_graph(widths: tuple[int, ...], full_alone: bool, expected: Cause) -> None:
    """This rank's own rows come before a peer's, and prefill work before a short row."""
    assert step_cause("NONE", shape(*widths), QUERY_LEN, True, full_alone) is expected


def test_a_full_step_has_no_cause() -> None:
    """FULL is what is wanted: the cause is empty."""
    assert step_cause("FULL", shape(3, 3), QUERY_LEN, True, True) == ""


def test_without_full_graphs_every_step_says_so() -> None:
    """A graph mode without full graphs explains all steps, whatever their rows."""
    assert step_cause("NONE", shape(3), QUERY_LEN, False, False) is Cause.NO_GRAPH
    assert step_cause("PIECEWISE", shape(40), QUERY_LEN, False, False) is Cause.NO_GRAPH


def test_take_hands_over_once_and_in_order() -> None:
    """Records come out as lists in field order, and only once; numbering goes on."""
    ring = StepRing()
    ring.append("FULL", shape(3, 3), padded_tokens=12, dummy=False, cause=Cause.NONE)
    ring.append("NONE", shape(3), padded_tokens=3, dummy=True, cause=Cause.PEER)
    assert ring.take() == {
        "records": [[0, "FULL", 3, 2, 6, 12, False, ""], [1, "NONE", 3, 1, 3, 3, True, "peer"]],
        "dropped": 0,
    }
    ring.append("FULL", shape(3), padded_tokens=3, dummy=False, cause=Cause.NONE)
    assert ring.take()["records"] == [[2, "FULL", 3, 1, 3, 3, False, ""]]


def test_a_full_ring_drops_the_oldest_and_counts_them() -> None:
    """A node that does not ask loses the oldest steps and learns how many; the count starts anew."""
    ring = StepRing(size=2)
    for _ in range(5):
        ring.append("FULL", shape(3), padded_tokens=3, dummy=False, cause=Cause.NONE)
    taken = ring.take()
    assert [record[0] for record in taken["records"]] == [3, 4]
    assert taken["dropped"] == 3
    assert ring.take() == {"records": [], "dropped": 0}


def test_what_is_taken_is_plain_data() -> None:
    """msgpack has no place for enum members: the cause is a str and nothing else."""
    ring = StepRing()
    ring.append("NONE", shape(1), padded_tokens=1, dummy=False, cause=Cause.SHORT_ROW)
    assert [type(value) for value in ring.take()["records"][0]] == [int, str, int, int, int, int, bool, str]


class Mode(Enum):
    """Names as vLLM's CUDAGraphMode has them."""

    NONE = 0
    FULL = 2

    def has_full_cudagraphs(self) -> bool:
        return self is Mode.FULL


class Descriptor:
    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens


class Dispatcher:
    """Full graphs of 3 and 12 tokens for uniform batches, as vLLM's dispatcher answers."""

    cudagraph_mode = Mode.FULL

    def dispatch(self, num_tokens: int, uniform_decode: bool) -> tuple[Mode, Descriptor]:
        if not uniform_decode or num_tokens > LARGEST_GRAPH:
            return Mode.NONE, Descriptor(num_tokens)
        return Mode.FULL, Descriptor(3 if num_tokens <= 3 else LARGEST_GRAPH)


class BaseRunner:
    """The runner's part: dispatch alone, then take the lower mode of a peer."""

    peer_lowers = False
    uniform_decode_query_len = QUERY_LEN

    def __init__(self) -> None:
        self.cudagraph_dispatcher = Dispatcher()

    def _determine_batch_execution_and_padding(
        self,
        num_tokens: int,
        num_reqs: int,
        num_scheduled_tokens_np: Any,
        max_num_scheduled_tokens: int,
        force_uniform_decode: bool | None = None,
    ) -> tuple[Mode, Descriptor]:
        uniform = max_num_scheduled_tokens == QUERY_LEN and num_tokens == QUERY_LEN * num_reqs
        if self.peer_lowers:
            return Mode.NONE, Descriptor(num_tokens)
        return self.cudagraph_dispatcher.dispatch(num_tokens, uniform)


class Runner(StepRecorderMixin, BaseRunner):
    def step(self, widths: Sequence[int], **kwargs: Any) -> None:
        self._determine_batch_execution_and_padding(
            num_tokens=sum(widths),
            num_reqs=len(widths),
            num_scheduled_tokens_np=np.array(widths),
            max_num_scheduled_tokens=max(widths),
            **kwargs,
        )


def test_a_real_step_is_recorded_with_its_padding() -> None:
    """Two rows of 3 run in the graph of 12 tokens."""
    runner = Runner()
    runner.step([3, 3])
    assert runner.step_ring.take()["records"] == [[0, "FULL", 3, 2, 6, 12, False, ""]]


def test_a_step_lowered_by_a_peer_blames_the_peer() -> None:
    """A uniform batch that would have run FULL alone."""
    runner = Runner()
    runner.peer_lowers = True
    runner.step([3, 3])
    assert runner.step_ring.take()["records"] == [[0, "NONE", 3, 2, 6, 6, False, "peer"]]


@pytest.mark.parametrize(
    ("widths", "cause"), [([3, 1], "short_row"), ([3, 5], "long_row"), ([3] * 5, "oversized")]
)
def test_a_step_that_breaks_alone_blames_itself(widths: list[int], cause: str) -> None:
    """The rank's own rows are the cause even when a peer lowers the mode as well."""
    runner = Runner()
    runner.step(widths)
    runner.peer_lowers = True
    runner.step(widths)
    assert [record[7] for record in runner.step_ring.take()["records"]] == [cause, cause]


def test_idle_steps_are_recorded_as_dummies_and_other_dummy_runs_are_not() -> None:
    """Profiling and warm-up are dummy runs too, but no steps."""
    runner = Runner()
    runner.step([3], force_uniform_decode=True)
    with runner.idle_step():
        runner.step([3], force_uniform_decode=True)
    runner.step([3], force_uniform_decode=False)
    assert runner.step_ring.take()["records"] == [[0, "FULL", 3, 1, 3, 3, True, ""]]
