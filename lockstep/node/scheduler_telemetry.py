"""Turns the decode scheduler's running totals into the node's metrics."""

from typing import Any

from lockstep.node.metrics import NodeMetrics


class SchedulerTelemetry:
    """Remembers each rank's last totals, so that counters take the difference only."""

    def __init__(self, metrics: NodeMetrics) -> None:
        self._totals = {
            "padded_arrivals": metrics.padded_arrivals,
            "reentries": metrics.reentries,
            "placeholder_drafts": metrics.placeholder_drafts,
        }
        self._by_label = {"bounced": metrics.bounced, "violations": metrics.violations}
        self._before: dict[str, dict[tuple[str, ...], int]] = {}

    def count(self, rank: str, snapshot: dict[str, Any]) -> None:
        """`snapshot` as decode_node.scheduler.counters gives it; empty from another scheduler."""
        if not snapshot:
            return
        before = self._before.get(rank, {})
        now = {(name,): int(snapshot[name]) for name in self._totals}
        now |= {(name, label): count for name in self._by_label for label, count in snapshot[name].items()}
        for key, total in now.items():
            name, *labels = key
            metric = self._by_label[name] if labels else self._totals[name]
            metric.labels(rank, *labels).inc(total - before.get(key, 0))
        self._before[rank] = now
