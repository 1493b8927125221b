"""Whether another attempt follows one that ended without an answer, and how soon."""

import random
import time
from collections.abc import Callable

from proxy.flight import Flight
from proxy.metrics import AttemptReason, ProxyMetrics, RetryDecision
from proxy.retries.budget import RetryBudget
from proxy.retries.limits import RetryLimits

_ASKED_FOR = frozenset({AttemptReason.PREEMPTED, AttemptReason.REVOKED, AttemptReason.DRAINED})
"""Nothing failed: a node gave the request back to serve others."""

_LOST = frozenset({AttemptReason.PREFILL_LOST, AttemptReason.DECODE_LOST})


class RetryRules:
    """All choices of one proxy share one budget."""

    def __init__(
        self,
        limits: RetryLimits,
        metrics: ProxyMetrics,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._draw = draw
        self._budget = RetryBudget(limits.budget_ratio, limits.budget_min_per_s, clock())

    def came(self) -> None:
        """A choice was started."""
        self._budget.earn()

    def wait_s(self, flight: Flight) -> float | None:
        """Seconds until the choice's next attempt may be sent; None if there is to be none.

        Free is what a node asked for, and the first time that a choice loses its node: else the death of one
        with a thousand streams would end most of them.
        """
        if self._is_free(flight):
            self._metrics.retry(RetryDecision.FREE)
        elif self._budget.spend(self._clock()):
            self._metrics.retry(RetryDecision.GRANTED)
        else:
            self._metrics.retry(RetryDecision.REFUSED)
            return None
        return self._backoff_s(flight)

    @property
    def hedge_after_s(self) -> float | None:
        """When an attempt whose prompt is not computed gets a hedge; None for never."""
        return self._limits.hedge_after_s

    def may_hedge(self) -> bool:
        """Whether the budget has one more attempt; it is taken then."""
        return self._budget.spend(self._clock())

    def _is_free(self, flight: Flight) -> bool:
        ends = [attempt.end.reason for attempt in flight.attempts if attempt.end is not None]
        is_first_loss = flight.next_reason in _LOST and sum(reason in _LOST for reason in ends) == 1
        return flight.next_reason in _ASKED_FOR or is_first_loss

    def _backoff_s(self, flight: Flight) -> float:
        """None before the second attempt, nor while the attempts give tokens: it goes elsewhere."""
        fruitless = 0
        for attempt in reversed(flight.attempts):
            if attempt.first_output_s:
                break
            fruitless += attempt.end is not None  # a hedge was left because the other one was faster
        if fruitless < 2:
            return 0.0
        most_s = min(self._limits.backoff_max_s, self._limits.backoff_s * 2.0 ** (fruitless - 2))
        return self._draw(0.0, most_s)
