"""A Prometheus histogram that is fed running totals, as another process has counted them."""

from collections.abc import Sequence
from typing import Any

from prometheus_client import Histogram


class TotalsHistogram(Histogram):
    """Advances by differences, so that a value is published once. Every series belongs to one source."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seen: dict[str, tuple[list[int], float]] = {}

    def advance(self, rank: str, counts: Sequence[int], total: float) -> None:
        """`counts` of each bucket by itself, the one without an upper bound last; `total` of all values.

        Raises ValueError for another number of buckets.
        """
        series: Any = self.labels(rank)
        before, total_before = self._seen.get(rank, ([0] * len(counts), 0.0))
        # prometheus_client's buckets do not include each other either (metrics.py, `Histogram.observe`).
        for bucket, now, then in zip(series._buckets, counts, before, strict=True):
            bucket.inc(now - then)
        series._sum.inc(total - total_before)
        self._seen[rank] = (list(counts), total)
