"""Keeps each rank's last engine steps, as the nodes' step records tell them, for the lanes of the page."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lockstep.rpc.generated import lockstep_pb2 as pb
from proxy.nodes import Node

KEPT_STEPS = 240
"""Of each rank. A rank that makes more in a second than this is shown with a gap."""

Step = tuple[int, str, str, int, int, int, int, bool]
"""step, mode, cause, width, rows, tokens, padded_tokens, dummy: the fields of pb.StepRecord."""


@dataclass(frozen=True, slots=True)
class LaneSteps:
    """Steps of one rank in order. A gap in the step numbers is one in what is known."""

    address: str
    local_rank: int
    global_rank: int
    steps: list[Step]


@dataclass(slots=True)
class _Lane:
    global_rank: int
    kept: deque[Step] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    new: deque[Step] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))


class Lanes:
    """Bounded whatever the nodes send and whether anybody looks; used from the event loop only."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[str, int], _Lane] = {}
        self._instances: dict[str, str] = {}

    def opened(self, node: Node) -> None:
        """A session with the node opened; one that was started anew counts its steps from 0.

        Prefill has no lanes: its steps are never uniform, and would look like a rank out of the full graph.
        """
        if node.role != "decode" or self._instances.get(node.address) == node.instance_id:
            return
        self.forget(node.address)
        self._instances[node.address] = node.instance_id
        for rank in node.ranks:
            self._lanes[node.address, rank.local_rank] = _Lane(rank.global_rank)

    def forget(self, address: str) -> None:
        """The node is no longer listed."""
        self._instances.pop(address, None)
        for key in [key for key in self._lanes if key[0] == address]:
            del self._lanes[key]

    def add(self, address: str, records: pb.StepRecords) -> None:
        """Take a second's steps of a rank; those of a rank that the node did not describe are left out."""
        lane = self._lanes.get((address, records.rank))
        if lane is None:
            return
        steps = [_step(record) for record in records.records[-KEPT_STEPS:]]
        lane.kept.extend(steps)
        lane.new.extend(steps)

    def all(self) -> list[LaneSteps]:
        """What is kept of every rank that has made a step."""
        return list(self._filled(lambda lane: lane.kept))

    def take_new(self) -> list[LaneSteps]:
        """The steps that came since the last call."""
        new = list(self._filled(lambda lane: lane.new))
        for lane in self._lanes.values():
            lane.new.clear()
        return new

    def _filled(self, steps_of: Callable[[_Lane], deque[Step]]) -> Iterator[LaneSteps]:
        for (address, local_rank), lane in self._lanes.items():
            if steps := steps_of(lane):
                yield LaneSteps(address, local_rank, lane.global_rank, list(steps))


def _step(record: pb.StepRecord) -> Step:
    return (
        record.step,
        record.mode,
        record.cause,
        record.width,
        record.rows,
        record.tokens,
        record.padded_tokens,
        record.dummy,
    )
