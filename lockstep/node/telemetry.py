"""Reads the engine cores once a second: loads, step records and KV counters, for metrics and proxies."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from lockstep.node.engine import RankStatus
from lockstep.node.engine_cores import EngineCores
from lockstep.node.kv_telemetry import KVTelemetry
from lockstep.node.metrics import NodeMetrics
from lockstep.node.quarantine import QuarantineWatch
from lockstep.node.scheduler_telemetry import SchedulerTelemetry
from lockstep.node.sessions import SessionRegistry
from lockstep.node.status import rank_status
from lockstep.rpc.generated import lockstep_pb2 as pb

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0

_SILENT_S = 5.0

OWN, PEER = "own", "peer"
"""Whose rows kept a step out of the full graph: the rank's own, whatever its peers did, or only a peer's."""


class Telemetry:
    """The last known load of every rank, and the running totals in the metrics.

    Only a decode node counts its steps by graph mode: prefill's are never uniform, and would look like a
    decode group out of its full graph.
    """

    def __init__(
        self,
        metrics: NodeMetrics,
        registry: SessionRegistry,
        counts_steps: bool,
        quarantine: QuarantineWatch | None = None,
    ) -> None:
        self._metrics = metrics
        self._registry = registry
        self._counts_steps = counts_steps
        self._loads: dict[int, pb.RankLoad] = {}
        self._untold: set[int] = set()
        """Ranks whose load came with a step, which not all proxies have outputs of."""
        self._global_ranks: list[int] = []
        self._kv = KVTelemetry(metrics)
        self._scheduler = SchedulerTelemetry(metrics)
        self._seen_causes: set[tuple[str, str]] = set()
        self._polled_s = 0.0
        self._quarantine = quarantine
        self._quarantined_blocks: list[int] = []
        self._stepped = False
        """Between the last two readings, on any rank."""

    def loads(self) -> list[pb.RankLoad]:
        return list(self._loads.values())

    def holds_kv(self, since_s: float) -> bool:
        """Whether KV blocks are in use, as read after a time of `time.monotonic`; True until it was read."""
        if not self._is_told(since_s):
            return False
        return self._polled_s <= since_s or any(load.kv_cache_usage for load in self._loads.values())

    def steps(self, since_s: float) -> bool:
        """Whether the ranks step, dummy steps included, as read after that time; True until it was read."""
        return self._is_told(since_s) and (self._stepped or self._polled_s <= since_s)

    def _is_told(self, since_s: float) -> bool:
        """False when the engines have not answered for so long that there is nothing to wait for."""
        return time.monotonic() - max(since_s, self._polled_s) < _SILENT_S

    def status(self, instance_id: str) -> pb.NodeStatus:
        """The answer to Status, as of the last poll; there has been one before the node describes itself."""
        return pb.NodeStatus(
            instance_id=instance_id,
            age_s=time.monotonic() - self._polled_s,
            num_sessions=self._registry.num_sessions,
            ranks=[
                rank_status(self._metrics, self._loads.get(local_rank, pb.RankLoad(rank=local_rank)), rank)
                for local_rank, rank in enumerate(self._global_ranks)
            ],
        )

    def observe(self, outputs: EngineCoreOutputs) -> pb.RankLoad:
        """Take the load that came with a step, if any did, and return the rank's load."""
        rank = self._local_rank(outputs.engine_index)
        stats = outputs.scheduler_stats
        if stats is not None:
            self._loads[rank] = pb.RankLoad(
                rank=rank,
                num_running=stats.num_running_reqs,
                num_waiting=stats.num_waiting_reqs,
                kv_cache_usage=stats.kv_cache_usage,
            )
            self._untold.add(rank)
            self._count_drafts(str(outputs.engine_index), stats.spec_decoding_stats)
        return self._loads.setdefault(rank, pb.RankLoad(rank=rank))

    def _count_drafts(self, rank: str, stats: SpecDecodingStats | None) -> None:
        if stats is not None:
            self._metrics.draft_tokens.labels(rank).inc(stats.num_draft_tokens)
            self._metrics.accepted_tokens.labels(rank).inc(stats.num_accepted_tokens)

    async def run(self, engine: EngineCores) -> str:
        """Poll until there is a reason for the node to start anew, and return it.

        Raises EngineDeadError or TimeoutError when an engine does not answer.
        """
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            await self.poll(engine)
            if self._quarantine is not None:
                reason = self._quarantine.exceeded(self._quarantined_blocks, self._polled_s)
                if reason:
                    return reason

    async def skip(self, engine: EngineCores) -> None:
        """Leave out what the engines have done so far, which is the warm-up."""
        for rank, status in zip(engine.global_ranks, await engine.status(), strict=True):
            self._scheduler.skip(str(rank), status.scheduler)  # steps are gone once they are read

    async def poll(self, engine: EngineCores) -> None:
        """Read all ranks, count what is new, and tell the proxies."""
        self._global_ranks = engine.global_ranks
        statuses = await engine.status()
        self._stepped = any(status.steps for status in statuses)
        self._quarantined_blocks = [status.kv.get("quarantined_blocks", 0) for status in statuses]
        for local_rank, status in enumerate(statuses):
            records = [_record(step) for step in status.steps]
            self._count(str(engine.global_ranks[local_rank]), status, records)
            load = pb.RankLoad(
                rank=local_rank,
                num_running=status.num_running,
                num_waiting=status.num_waiting,
                kv_cache_usage=status.kv_cache_usage,
            )
            if local_rank in self._untold or load != self._loads.get(local_rank):
                self._untold.discard(local_rank)
                self._loads[local_rank] = load
                self._registry.broadcast(pb.NodeFrame(load=load))
            if records:
                frame = pb.StepRecords(rank=local_rank, records=records, dropped=status.steps_dropped)
                self._registry.broadcast(pb.NodeFrame(records=frame))
        self._metrics.sessions.set(self._registry.num_sessions)
        self._polled_s = time.monotonic()

    def _count(self, rank: str, status: RankStatus, records: Sequence[pb.StepRecord]) -> None:
        self._metrics.requests_running.labels(rank).set(status.num_running)
        self._metrics.requests_waiting.labels(rank).set(status.num_waiting)
        self._metrics.kv_cache_usage.labels(rank).set(status.kv_cache_usage)
        if self._counts_steps:
            self._metrics.step_records_dropped.labels(rank).inc(status.steps_dropped)
            for record in records:
                self._count_step(rank, record)
        self._kv.count(rank, status.kv)
        self._scheduler.count(rank, status.scheduler)

    def _count_step(self, rank: str, record: pb.StepRecord) -> None:
        """And say the first time that a cause appears on a rank; later ones are in the metrics only."""
        origin = _origin(record)
        self._metrics.decode_steps.labels(rank, record.mode, record.cause, origin).inc()
        if origin and (rank, record.cause) not in self._seen_causes:
            self._seen_causes.add((rank, record.cause))
            logger.warning(
                "decode rank %s left the full graph for the first time because of %s (%s): step %d, mode %s, "
                "%d row(s) of up to %d tokens, %d tokens padded to %d%s",
                *(rank, record.cause, "a peer" if origin == PEER else "its own rows"),
                *(record.step, record.mode, record.rows, record.width, record.tokens, record.padded_tokens),
                ", idle" if record.dummy else "",
            )

    def _local_rank(self, engine_index: int) -> int:
        """EngineCoreOutputs carry the global rank (vllm/v1/engine/core.py, `engine_index`)."""
        return self._global_ranks.index(engine_index) if engine_index in self._global_ranks else engine_index


def _origin(record: pb.StepRecord) -> str:
    """Of a step that was not FULL, else "". "peer" is a cause of decode_node.step_recorder.Cause."""
    if record.mode == "FULL":
        return ""
    return PEER if record.cause == PEER else OWN


def _record(values: list[Any]) -> pb.StepRecord:
    """From the field order of decode_node.step_recorder.StepRecord."""
    step, mode, width, rows, tokens, padded_tokens, dummy, cause = values
    return pb.StepRecord(
        step=step,
        mode=mode,
        width=width,
        rows=rows,
        tokens=tokens,
        padded_tokens=padded_tokens,
        dummy=dummy,
        cause=cause,
    )
