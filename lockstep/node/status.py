"""Builds the answer to Status from the node's metrics, so that both always tell the same."""

from prometheus_client.metrics import MetricWrapperBase

from lockstep.metrics import values
from lockstep.node.metrics import NodeMetrics
from lockstep.rpc.generated import lockstep_pb2 as pb

# Kinds of kv_transfer.counters.KVCounters.snapshot that are a field of KVStatus; the others are its events.
_KV_TOTALS = ("pushed_requests", "pushed_blocks", "received_requests", "received_blocks")


def rank_status(metrics: NodeMetrics, load: pb.RankLoad, global_rank: int) -> pb.RankStatus:
    """Totals of one rank since the process started, and its last known load."""
    rank = str(global_rank)
    steps = _of_rank(metrics.decode_steps, rank)
    return pb.RankStatus(
        global_rank=global_rank,
        load=load,
        steps=[
            pb.StepCount(mode=mode, cause=cause, origin=origin, count=count)
            for (mode, cause, origin), count in sorted(steps.items())
        ],
        step_records_dropped=_value(metrics.step_records_dropped, rank),
        draft_tokens=_value(metrics.draft_tokens, rank),
        accepted_tokens=_value(metrics.accepted_tokens, rank),
        kv=_kv_status(metrics, rank),
        scheduler=_scheduler_status(metrics, rank),
    )


def _scheduler_status(metrics: NodeMetrics, rank: str) -> pb.SchedulerStatus | None:
    """None where no scheduler of ours has counted."""
    if not _of_rank(metrics.padded_arrivals, rank):
        return None
    return pb.SchedulerStatus(
        hand_offs=_value(metrics.hand_offs, rank),
        handed_over_drafts=_value(metrics.handed_over_drafts, rank),
        padded_arrivals=_value(metrics.padded_arrivals, rank),
        reentries=_value(metrics.reentries, rank),
        placeholder_drafts=_value(metrics.placeholder_drafts, rank),
        bounced=_by_label(metrics.bounced, rank),
        violations=_by_label(metrics.violations, rank),
    )


def _kv_status(metrics: NodeMetrics, rank: str) -> pb.KVStatus:
    events = _of_rank(metrics.kv_events, rank)
    status = pb.KVStatus(
        pushed_bytes=_value(metrics.kv_pushed_bytes, rank),
        events=[
            pb.KVEvent(kind=kind, reason=reason, count=count)
            for (kind, reason), count in sorted(events.items())
            if count and kind not in _KV_TOTALS
        ],
        bytes_per_block=_value(metrics.kv_block_bytes, rank),
        quarantined_blocks=_value(metrics.kv_quarantined_blocks, rank),
        quarantined_requests=_value(metrics.kv_quarantined_requests, rank),
    )
    for kind in _KV_TOTALS:
        setattr(status, kind, events.get((kind, ""), 0))
    return status


def _value(metric: MetricWrapperBase, rank: str) -> int:
    return _of_rank(metric, rank).get((), 0)


def _by_label(metric: MetricWrapperBase, rank: str) -> dict[str, int]:
    """Of a metric with one label besides the rank."""
    return {label: count for (label,), count in sorted(_of_rank(metric, rank).items())}


def _of_rank(metric: MetricWrapperBase, rank: str) -> dict[tuple[str, ...], int]:
    """The rank's values by the labels that follow the rank; all of them are whole numbers."""
    return {labels[1:]: int(value) for labels, value in values(metric).items() if labels[0] == rank}
