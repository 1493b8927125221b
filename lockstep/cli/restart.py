"""Decides whether and when a process that died is started again; pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Back off while a process keeps dying quickly, give up after `max_quick_deaths` of those in a row."""

    quick_s: float = 30.0
    max_quick_deaths: int = 5
    first_delay_s: float = 0.5
    max_delay_s: float = 10.0

    def delay_s(self, ready_for_s: Sequence[float]) -> float | None:
        """How long to wait before the next start, or None to give up.

        `ready_for_s`: for each run so far, oldest first, how long it was ready (0 if it never was).
        """
        quick = sum(1 for _ in takewhile(lambda lived_s: lived_s < self.quick_s, reversed(ready_for_s)))
        if quick >= self.max_quick_deaths:
            return None
        return min(self.first_delay_s * 2.0 ** max(quick - 1, 0), self.max_delay_s)
