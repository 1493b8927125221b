"""The connector's totals become Prometheus counters without counting anything twice."""

from lockstep.node.kv_telemetry import KVTelemetry
from lockstep.node.metrics import NodeMetrics


def test_totals_are_counted_once() -> None:
    """Two snapshots of running totals: the counters end at the second, by rank and reason."""
    metrics = NodeMetrics()
    telemetry = KVTelemetry(metrics)
    telemetry.count("0", {"pushed_bytes": 100, "failed": {"deadline": 1}, "kv_bytes_per_block": 64})
    telemetry.count("1", {"pushed_bytes": 7, "failed": {}, "kv_bytes_per_block": 64})
    telemetry.count(
        "0", {"pushed_bytes": 250, "failed": {"deadline": 1, "aborted": 2}, "quarantined_blocks": 3}
    )
    value = metrics.registry.get_sample_value
    assert value("lockstep_kv_pushed_bytes_total", {"rank": "0"}) == 250
    assert value("lockstep_kv_pushed_bytes_total", {"rank": "1"}) == 7
    events = "lockstep_kv_events_total"
    assert value(events, {"rank": "0", "kind": "failed", "reason": "deadline"}) == 1
    assert value(events, {"rank": "0", "kind": "failed", "reason": "aborted"}) == 2
    assert value("lockstep_kv_block_bytes", {"rank": "0"}) == 64
    assert value("lockstep_kv_quarantined_blocks", {"rank": "0"}) == 3
