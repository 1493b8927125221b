"""What one worker's connector has done since it started, to be read at any time."""

import threading
from collections import Counter
from typing import Any

from kv_transfer.histograms import Histogram
from kv_transfer.reasons import bounded
from lockstep.kv_buckets import BOUNDS


class KVCounters:
    """Thread-safe: the engine thread and the push writer thread both count.

    Names are those of `snapshot`; those with a reason are dictionaries from reason to count.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._by_reason: dict[str, Counter[str]] = {
            "released": Counter(),  # prefill: blocks given back without a push
            "refused": Counter(),  # prefill: registrations and cancels answered with "released"
            "failed": Counter(),  # decode: receives that failed
            "cancels_sent": Counter(),  # decode: cancels sent to prefill
        }
        self._histograms = {name: Histogram(bounds) for name, bounds in BOUNDS.items()}
        self.kv_bytes_per_block = 0

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._totals[name] += amount

    def add_reason(self, name: str, reason: str) -> None:
        with self._lock:
            self._by_reason[name][bounded(reason)] += 1

    def observe(self, name: str, value: float) -> None:
        """Names are those of lockstep.kv_buckets."""
        with self._lock:
            self._histograms[name].observe(value)

    def snapshot(self) -> dict[str, Any]:
        """Plain ints and dicts, safe to send between processes.

        pushed_requests, pushed_blocks, pushed_bytes (as NIXL's telemetry counted them), pushed_chunks
        (writes), streamed_chunks (those given out while the prompt was computed), restarted_pushes (by a
        preemption on prefill), received_requests, received_blocks, malformed_notices, late_notices,
        notices_failed, leases_expired, questions_sent (while decode stood still), kv_bytes_per_block (all
        layers of one block on this worker), the dictionaries released, refused, failed, cancels_sent, and
        histograms: {name: Histogram.snapshot}.
        """
        names = (
            "pushed_requests",
            "pushed_blocks",
            "pushed_bytes",
            "pushed_chunks",
            "streamed_chunks",
            "restarted_pushes",
            "received_requests",
            "received_blocks",
            "malformed_notices",
            "late_notices",
            "notices_failed",
            "leases_expired",
            "questions_sent",
        )
        with self._lock:
            totals = {name: self._totals[name] for name in names}
            reasons = {name: dict(counter) for name, counter in self._by_reason.items()}
            histograms = {name: histogram.snapshot() for name, histogram in self._histograms.items()}
        gauges = {"kv_bytes_per_block": self.kv_bytes_per_block}
        return totals | reasons | gauges | {"histograms": histograms}
