"""Turns the connector's running totals into the node's metrics."""

from typing import Any

from lockstep.node.metrics import NodeMetrics


class KVTelemetry:
    """Remembers each rank's last totals, so that counters take the difference only."""

    def __init__(self, metrics: NodeMetrics) -> None:
        self._metrics = metrics
        # What the connector says of the present; everything else only grows.
        self._gauges = {
            "kv_bytes_per_block": metrics.kv_block_bytes,
            "quarantined_blocks": metrics.kv_quarantined_blocks,
            "quarantined_requests": metrics.kv_quarantined_requests,
            "leases_held": metrics.kv_leases_held,
            "leases_overdue": metrics.kv_leases_overdue,
        }
        self._before: dict[str, dict[tuple[str, str], int]] = {}

    def count(self, rank: str, snapshot: dict[str, Any]) -> None:
        """`snapshot` as kv_transfer.counters.KVCounters gives it: a value is a number or {reason: number}.

        "histograms" maps a name of lockstep.kv_buckets to the totals of a histogram.
        """
        for name, histogram in snapshot.get("histograms", {}).items():
            self._metrics.kv_histograms[name].advance(rank, histogram["counts"], histogram["total"])
        totals = {
            (kind, reason): number
            for kind, value in snapshot.items()
            if kind != "histograms"
            for reason, number in (value.items() if isinstance(value, dict) else [("", value)])
        }
        before = self._before.get(rank, {})
        for (kind, reason), total in totals.items():
            if kind in self._gauges:
                self._gauges[kind].labels(rank).set(total)
            elif kind == "pushed_bytes":
                self._metrics.kv_pushed_bytes.labels(rank).inc(total - before.get((kind, reason), 0))
            else:
                new = total - before.get((kind, reason), 0)
                self._metrics.kv_events.labels(rank, kind, reason).inc(new)
        self._before[rank] = totals
