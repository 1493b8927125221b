"""A bucket of attempts that may follow failures: filled by requests and by time, emptied by such attempts.

When everything fails, each request would become as many as it has attempts, and keep failing what could
recover. With a budget the load stays within a share of what clients send (as Finagle's RetryBudget has it).
"""

_SAVED_S = 10.0
"""So many seconds' worth of the minimum rate may be saved up."""


class RetryBudget:
    """`ratio` for each request, `min_per_s` for each second; full at the beginning."""

    def __init__(self, ratio: float, min_per_s: float, now_s: float) -> None:
        self._ratio = ratio
        self._min_per_s = min_per_s
        self._reserve = self._most_reserve = min_per_s * _SAVED_S
        self._earned = 0.0
        self._most_earned = max(100.0, self._most_reserve)
        self._refilled_s = now_s

    def earn(self) -> None:
        """A request came."""
        self._earned = min(self._most_earned, self._earned + self._ratio)

    def spend(self, now_s: float) -> bool:
        """Whether one more attempt may be made; it counts as made then."""
        since_s = max(0.0, now_s - self._refilled_s)
        self._reserve = min(self._most_reserve, self._reserve + since_s * self._min_per_s)
        self._refilled_s = now_s
        if self._earned >= 1.0:
            self._earned -= 1.0
        elif self._reserve >= 1.0:
            self._reserve -= 1.0
        else:
            return False
        return True
