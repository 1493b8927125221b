"""Counts of observed values by fixed bounds, which travel between processes as plain numbers."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any


class Histogram:
    """Not thread-safe; the caller holds a lock."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """A bound belongs to the bucket below it, as in Prometheus."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> dict[str, Any]:
        """`counts` of each bucket by itself, the one without an upper bound last; `total` of all values."""
        return {"counts": list(self._counts), "total": self._total}
