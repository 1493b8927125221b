"""The connector's totals become Prometheus counters without counting anything twice."""

from kv_transfer.counters import KVCounters
from lockstep.kv_buckets import BOUNDS
from lockstep.node.kv_telemetry import KVTelemetry
from lockstep.node.metrics import NodeMetrics


def test_totals_are_counted_once() -> None:
    """Two snapshots of running totals: the counters end at the second, by rank and reason."""
    metrics = NodeMetrics()
    telemetry = KVTelemetry(metrics)
    telemetry.count("0", {"pushed_bytes": 100, "failed": {"deadline": 1}, "kv_bytes_per_block": 64})
    telemetry.count("1", {"pushed_bytes": 7, "failed": {}, "kv_bytes_per_block": 64})
    telemetry.count(
        "0",
        {
            "pushed_bytes": 250,
            "failed": {"deadline": 1, "aborted": 2},
            "quarantined_blocks": 3,
            "leases_overdue": 2,
        },
    )
    value = metrics.registry.get_sample_value
    assert value("lockstep_kv_pushed_bytes_total", {"rank": "0"}) == 250
    assert value("lockstep_kv_pushed_bytes_total", {"rank": "1"}) == 7
    events = "lockstep_kv_events_total"
    assert value(events, {"rank": "0", "kind": "failed", "reason": "deadline"}) == 1
    assert value(events, {"rank": "0", "kind": "failed", "reason": "aborted"}) == 2
    assert value("lockstep_kv_block_bytes", {"rank": "0"}) == 64
    assert value("lockstep_kv_quarantined_blocks", {"rank": "0"}) == 3
    assert value("lockstep_kv_leases_overdue", {"rank": "0"}) == 2


def test_histograms_are_advanced_by_what_is_new() -> None:
    """Counts and sum end at the last snapshot; a value on a bound lies in the bucket below."""
    metrics = NodeMetrics()
    telemetry = KVTelemetry(metrics)
    counters = KVCounters()
    counters.observe("write_seconds", 0.002)
    telemetry.count("0", counters.snapshot())
    counters.observe("write_seconds", 0.5)
    counters.observe("write_seconds", 100.0)
    telemetry.count("0", counters.snapshot())
    telemetry.count("0", counters.snapshot())
    value, name = metrics.registry.get_sample_value, "lockstep_kv_write_seconds"
    buckets = {
        le: value(f"{name}_bucket", {"rank": "0", "le": le}) for le in ("0.001", "0.002", "0.5", "+Inf")
    }
    assert buckets == {"0.001": 0, "0.002": 1, "0.5": 2, "+Inf": 3}
    assert value(f"{name}_count", {"rank": "0"}) == 3
    assert value(f"{name}_sum", {"rank": "0"}) == 100.502


def test_every_histogram_of_the_connector_is_published() -> None:
    """With the bounds that the connector counts by."""
    metrics = NodeMetrics()
    assert {name: metric._kwargs["buckets"] for name, metric in metrics.kv_histograms.items()} == BOUNDS
