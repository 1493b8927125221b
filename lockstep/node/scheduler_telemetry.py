"""Turns the decode scheduler's running totals into the node's metrics."""

from typing import Any

from lockstep.node.metrics import NodeMetrics


class SchedulerTelemetry:
    """Remembers each rank's last totals, so that counters take the difference only."""

    def __init__(self, metrics: NodeMetrics) -> None:
        self._totals = {
            "hand_offs": metrics.hand_offs,
            "handed_over_drafts": metrics.handed_over_drafts,
            "padded_arrivals": metrics.padded_arrivals,
            "reentries": metrics.reentries,
            "placeholder_drafts": metrics.placeholder_drafts,
        }
        self._by_label = {"bounced": metrics.bounced, "violations": metrics.violations}
        self._before: dict[str, dict[tuple[str, str], int]] = {}

    def skip(self, rank: str, snapshot: dict[str, Any]) -> None:
        """Leave out what was counted so far."""
        if snapshot:
            self._before[rank] = self._flat(snapshot)

    def count(self, rank: str, snapshot: dict[str, Any]) -> None:
        """`snapshot` as decode_node.scheduler.counters gives it; empty from another scheduler."""
        if not snapshot:
            return
        before, now = self._before.get(rank, {}), self._flat(snapshot)
        for (name, label), total in now.items():
            new = total - before.get((name, label), 0)
            if name in self._totals:
                self._totals[name].labels(rank).inc(new)
            else:
                self._by_label[name].labels(rank, label).inc(new)
        self._before[rank] = now

    def _flat(self, snapshot: dict[str, Any]) -> dict[tuple[str, str], int]:
        """By name and label, "" for a plain number."""
        plain: dict[tuple[str, str], int] = {(name, ""): snapshot[name] for name in self._totals}
        return plain | {(name, label): n for name in self._by_label for label, n in snapshot[name].items()}
