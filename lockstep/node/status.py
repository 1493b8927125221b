"""Builds the answer to Status from the node's metrics, so that both always tell the same."""

from prometheus_client.metrics import MetricWrapperBase

from lockstep.metrics import values
from lockstep.node.metrics import NodeMetrics
from lockstep.rpc.generated import lockstep_pb2 as pb

# Kinds of kv_transfer.counters.KVCounters.snapshot that are a field of KVStatus; the others are its events.
_KV_TOTALS = ("pushed_requests", "pushed_blocks", "received_requests", "received_blocks")
_KV_GAUGES = {
    "kv_bytes_per_block": "bytes_per_block",
    "quarantined_blocks": "quarantined_blocks",
    "quarantined_requests": "quarantined_requests",
}


def rank_status(metrics: NodeMetrics, load: pb.RankLoad, global_rank: int) -> pb.RankStatus:
    """Totals of one rank since the process started, and its last known load."""
    rank = str(global_rank)
    steps = _of_rank(metrics.decode_steps, rank)
    return pb.RankStatus(
        global_rank=global_rank,
        load=load,
        steps=[
            pb.StepCount(mode=mode, cause=cause, count=count)
            for (mode, cause), count in sorted(steps.items())
        ],
        step_records_dropped=_total(metrics.step_records_dropped, rank),
        draft_tokens=_total(metrics.draft_tokens, rank),
        accepted_tokens=_total(metrics.accepted_tokens, rank),
        kv=_kv_status(metrics, rank),
    )


def _kv_status(metrics: NodeMetrics, rank: str) -> pb.KVStatus:
    events = _of_rank(metrics.kv_events, rank)
    gauges = _of_rank(metrics.kv_blocks, rank)
    status = pb.KVStatus(
        pushed_bytes=_total(metrics.kv_pushed_bytes, rank),
        events=[
            pb.KVEvent(kind=kind, reason=reason, count=count)
            for (kind, reason), count in sorted(events.items())
            if count and kind not in _KV_TOTALS
        ],
    )
    for kind in _KV_TOTALS:
        setattr(status, kind, events.get((kind, ""), 0))
    for kind, field in _KV_GAUGES.items():
        setattr(status, field, gauges.get((kind,), 0))
    return status


def _total(metric: MetricWrapperBase, rank: str) -> int:
    return _of_rank(metric, rank).get((), 0)


def _of_rank(metric: MetricWrapperBase, rank: str) -> dict[tuple[str, ...], int]:
    """The rank's values by the labels that follow the rank; all of them are whole numbers."""
    return {labels[1:]: int(value) for labels, value in values(metric).items() if labels[0] == rank}
