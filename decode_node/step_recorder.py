"""Owns the record of how each step of the target model was dispatched, and why if not under a full graph.

Imports neither vLLM nor torch: the ring and the causes are tested alone, and the runner mixin fits every V1
model runner (CPU and GPU), which share `_determine_batch_execution_and_padding`.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from enum import StrEnum
from typing import Any

RING_SIZE = 4096


class Cause(StrEnum):
    """Why a step did not run under a full graph; NONE for a step that did."""

    NONE = ""
    SHORT_ROW = "short_row"
    LONG_ROW = "long_row"
    OVERSIZED = "oversized"
    PEER = "peer"
    NO_GRAPH = "no_graph"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the target model on one rank.

    Attributes:
        step: number of the step on this worker, from 0, without gaps; a gap in what was taken is a drop.
        mode: "FULL", "PIECEWISE" or "NONE", after the agreement with the other ranks.
        width_tokens: largest number of tokens that one row schedules.
        rows: scheduled requests.
        num_tokens: scheduled tokens.
        padded_tokens: tokens that the model runs, padding included.
        dummy: the rank had no work and only keeps its peers company.
        cause: see `Cause`.
    """

    step: int
    mode: str
    width_tokens: int
    rows: int
    num_tokens: int
    padded_tokens: int
    dummy: bool
    cause: str


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a rank brings to a step: `rows` requests of `min_width` to `max_width` tokens each."""

    rows: int
    min_width: int
    max_width: int
    num_tokens: int


def step_cause(mode: str, shape: StepShape, query_len: int, has_full_graph: bool, full_alone: bool) -> Cause:
    """Why a step was not FULL. This rank's own fault comes before a peer's, prefill work before a short row.

    Args:
        mode: mode of the step after the agreement with the other ranks.
        shape: this rank's rows.
        query_len: 1 + K, the only width a full graph takes.
        has_full_graph: the resolved graph mode has full graphs for decode at all.
        full_alone: this rank's own dispatch, before the agreement, chose FULL.
    """
    if mode == "FULL":
        return Cause.NONE
    if not has_full_graph:
        return Cause.NO_GRAPH
    if full_alone:
        return Cause.PEER
    if shape.max_width > query_len:
        return Cause.LONG_ROW
    if shape.min_width < query_len:
        return Cause.SHORT_ROW
    return Cause.OVERSIZED


class StepRing:
    """The last `size` records; older ones that nobody took are dropped and counted."""

    def __init__(self, size: int = RING_SIZE) -> None:
        self._records: deque[StepRecord] = deque(maxlen=size)
        self._next_step = 0
        self._dropped = 0

    def append(self, mode: str, shape: StepShape, padded_tokens: int, dummy: bool, cause: Cause) -> None:
        if len(self._records) == self._records.maxlen:
            self._dropped += 1
        self._records.append(
            StepRecord(
                step=self._next_step,
                mode=mode,
                width_tokens=shape.max_width,
                rows=shape.rows,
                num_tokens=shape.num_tokens,
                padded_tokens=padded_tokens,
                dummy=dummy,
                cause=cause.value,
            )
        )
        self._next_step += 1

    def take(self) -> dict[str, Any]:
        """Hand over and forget: {"records": `StepRecord` fields in order, "dropped": since last time}."""
        taken = {"records": [list(astuple(record)) for record in self._records], "dropped": self._dropped}
        self._records.clear()
        self._dropped = 0
        return taken


class StepRecorderMixin:
    """Put before a V1 model runner: records each real step, and dummy steps inside `idle_step()`.

    The drafter has a `_determine_batch_execution_and_padding` of its own (llm_base_proposer.py:1771), so its
    agreements are not seen here. Profiling and warm-up are dummy runs outside `idle_step()`.
    """

    cudagraph_dispatcher: Any
    uniform_decode_query_len: int
    _step_ring: StepRing | None = None
    _in_idle_step = False

    @property
    def step_ring(self) -> StepRing:
        if self._step_ring is None:
            self._step_ring = StepRing()
        return self._step_ring

    @contextmanager
    def idle_step(self) -> Iterator[None]:
        """Mark the dummy run inside as a step that this rank makes for its peers."""
        self._in_idle_step = True
        try:
            yield
        finally:
            self._in_idle_step = False

    def _determine_batch_execution_and_padding(
        self,
        num_tokens: int,
        num_reqs: int,
        num_scheduled_tokens_np: Any,
        max_num_scheduled_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As vLLM's (v1/worker/gpu_model_runner.py:3718), and note the outcome."""
        decided = super()._determine_batch_execution_and_padding(  # type: ignore[misc]
            num_tokens, num_reqs, num_scheduled_tokens_np, max_num_scheduled_tokens, *args, **kwargs
        )
        # Only dummy runs say which shape to assume (gpu_model_runner.py:5619); real steps leave it open.
        dummy = kwargs.get("force_uniform_decode") is not None
        if not dummy or self._in_idle_step:
            widths = num_scheduled_tokens_np[:num_reqs]
            shape = StepShape(num_reqs, int(widths.min()), int(widths.max()), num_tokens)
            mode = decided[0].name
            self.step_ring.append(mode, shape, decided[1].num_tokens, dummy, self._cause(mode, shape))
        return decided

    def _cause(self, mode: str, shape: StepShape) -> Cause:
        if mode == "FULL":
            return Cause.NONE
        query_len = self.uniform_decode_query_len
        uniform = shape.min_width == shape.max_width == query_len
        # The dispatcher is a pure function of the shape: asked again, it tells what this rank alone would do.
        alone, _ = self.cudagraph_dispatcher.dispatch(num_tokens=shape.num_tokens, uniform_decode=uniform)
        has_full = self.cudagraph_dispatcher.cudagraph_mode.has_full_cudagraphs()
        return step_cause(mode, shape, query_len, has_full, full_alone=alone.name == "FULL")


class RecordingWorkerMixin:
    """Put before a V1 worker whose runner has `StepRecorderMixin`."""

    model_runner: Any

    def execute_dummy_batch(self) -> Any:
        """A step without work, run because other ranks have some; recorded as such."""
        with self.model_runner.idle_step():
            return super().execute_dummy_batch()  # type: ignore[misc]

    def lockstep_take_step_records(self) -> dict[str, Any]:
        """RPC method (`collective_rpc`): the steps since the last call, plain data; see `StepRing.take`."""
        taken: dict[str, Any] = self.model_runner.step_ring.take()
        return taken
