"""What the scheduler counts since it started, for the node's telemetry."""

from collections import Counter
from typing import Any

from decode_node.scheduler.rows import Violation
from lockstep.bounce import Bounce


class SchedulerCounters:
    """Plain numbers; only the engine's own thread touches them."""

    def __init__(self) -> None:
        self.hand_offs = 0
        self.handed_over_drafts = 0
        self.padded_arrivals = 0
        self.placeholder_drafts = 0
        self.reentries = 0
        self.bounced: Counter[Bounce] = Counter()
        self.violations: Counter[Violation] = Counter()

    def snapshot(self) -> dict[str, Any]:
        """Values that msgpack knows.

        hand_offs: requests that went on from prefill's first token.
        handed_over_drafts: drafts that came with it and were scheduled.
        padded_arrivals: requests whose first row was filled up with placeholders.
        placeholder_drafts: placeholders among the scheduled drafts.
        reentries: rows of requests that the step before had left out.
        bounced: requests handed back, by `Bounce`.
        violations: steps with a row of another width than 1 + K, by `Violation`.
        """
        return {
            "hand_offs": self.hand_offs,
            "handed_over_drafts": self.handed_over_drafts,
            "padded_arrivals": self.padded_arrivals,
            "placeholder_drafts": self.placeholder_drafts,
            "reentries": self.reentries,
            "bounced": {str(reason): count for reason, count in self.bounced.items()},
            "violations": {str(cause): count for cause, count in self.violations.items()},
        }
