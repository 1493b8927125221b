"""Finds ranks that have work and make no step: what a session's frames say of it, without clocks or I/O."""

from collections.abc import Set
from dataclasses import dataclass

from proxy.nodes import Node
from proxy.routing import RankKey


@dataclass(slots=True)
class _Rank:
    stepped_s: float
    """When the last step was heard of; a rank that gets work has had one just then."""
    num_running: int = 0
    records_steps: bool = False
    frozen: bool = False
    """Until it is heard of, since what it had to do may have gone elsewhere."""


class StepWatch:
    """All ranks of all open sessions. Times are `time.monotonic` of the proxy.

    A rank has work while it reports running requests, or while requests of this proxy get tokens from it.
    Requests that wait for KV or for blocks are no work: an engine need not step for them.
    """

    def __init__(self, frozen_after_s: float) -> None:
        self._frozen_after_s = frozen_after_s
        self._ranks: dict[RankKey, _Rank] = {}
        self._checked_s: float | None = None

    def opened(self, node: Node, now_s: float) -> None:
        """A session with the node is open."""
        self.closed(node.address)
        records = node.description.engine.records_steps
        for rank in node.ranks:
            self._ranks[node.address, rank.local_rank] = _Rank(now_s, records_steps=records)

    def closed(self, address: str) -> None:
        """Its session ended."""
        for key in [key for key in self._ranks if key[0] == address]:
            del self._ranks[key]

    def stepped(self, address: str, local_rank: int, now_s: float) -> None:
        """Outputs or records of a step have come."""
        rank = self._ranks.get((address, local_rank))
        if rank is not None:
            rank.stepped_s, rank.frozen = now_s, False

    def reported(self, address: str, local_rank: int, num_running: int, now_s: float) -> None:
        """The node told the rank's load. It tells changes only, so what it told last is still so."""
        rank = self._ranks.get((address, local_rank))
        if rank is None:
            return
        if rank.frozen or (num_running and not rank.num_running):
            rank.stepped_s, rank.frozen = now_s, False
        rank.num_running = num_running

    def frozen(self, streaming: Set[RankKey], now_s: float) -> dict[RankKey, float]:
        """The ranks that stand still though they have work, with the seconds since their last step.

        `streaming` are those that requests of this proxy have had tokens from. To be called often: the time
        in which this process itself stood still is not held against anybody.
        """
        since_check_s = 0.0 if self._checked_s is None else now_s - self._checked_s
        self._checked_s = now_s
        found = {}
        for key, rank in self._ranks.items():
            if since_check_s > self._frozen_after_s / 2:
                rank.stepped_s += since_check_s
            # Without records only steps with outputs for this proxy are heard of.
            has_work = key in streaming or (rank.num_running and rank.records_steps)
            still_s = now_s - rank.stepped_s
            rank.frozen |= bool(has_work) and still_s > self._frozen_after_s
            if rank.frozen:
                found[key] = still_s
        return found
