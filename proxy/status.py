"""Owns GET /lockstep/status: what this proxy and every node say, in one document (lockstep/status.py)."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata

import grpc.aio
import msgspec
from fastapi import FastAPI, Response

from lockstep import metrics
from lockstep import status as schema
from lockstep.rpc.generated import lockstep_pb2 as pb
from proxy.cluster import Listed
from proxy.flow import Flow
from proxy.metrics import ProxyMetrics
from proxy.nodes import CompatibilityKey, Node, Rank
from proxy.routing import RankLoad
from proxy.session import NodeSession

NODE_TIMEOUT_S = 2.0
"""A node that does not answer in this time is marked so. All are asked at once: it does not hold them up."""

_REASON_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Served:
    """What the front end was built with."""

    models: Sequence[str]
    context_limit_tokens: int


@dataclass(frozen=True, slots=True)
class _Answer:
    kind: schema.Answer
    reason: str = ""
    status: pb.NodeStatus | None = None


class Collector:
    """Puts the document together when asked; before there is a front end, nothing is served yet."""

    def __init__(self, flow: Flow, worker: tuple[int, int] = (1, 1)) -> None:
        """`worker`: which of how many processes on the port this is."""
        self._flow = flow
        self._worker = worker
        self._served = Served((), 0)
        self._started_s: float | None = None

    def begin(self, served: Served) -> None:
        """The front end is built."""
        self._served, self._started_s = served, time.monotonic()

    async def document(self) -> schema.StatusDocument:
        """As `collect`."""
        uptime_s = time.monotonic() - self._started_s if self._started_s is not None else 0.0
        return await collect(self._flow, self._served, uptime_s, self._worker)


def add_route(app: FastAPI, document: Callable[[], Awaitable[schema.StatusDocument]]) -> None:
    """Add the route. Who may ask is decided before the app: where there are keys, proxy/security/guard.py."""

    @app.get(schema.STATUS_PATH, include_in_schema=False)
    async def status() -> Response:
        return Response(msgspec.json.encode(await document()), media_type="application/json")


async def collect(
    flow: Flow, served: Served, uptime_s: float, worker: tuple[int, int] = (1, 1)
) -> schema.StatusDocument:
    """Ask all nodes at once and put the document together; takes NODE_TIMEOUT_S at most."""
    listed = flow.cluster.listed()
    answers = await asyncio.gather(*(_ask(flow.session(entry.address), entry.node) for entry in listed))
    keys = list(dict.fromkeys(entry.node.key for entry in listed if entry.node is not None))
    return schema.StatusDocument(
        schema_version=schema.SCHEMA_VERSION,
        proxy=_proxy(flow, served, uptime_s, worker),
        nodes=[
            _node(entry, answer, keys, flow.ranks.of(entry.address))
            for entry, answer in zip(listed, answers, strict=True)
        ],
        compatibility_groups=[
            _group(number, key, _serves(flow, key), listed) for number, key in enumerate(keys)
        ],
    )


async def _ask(session: NodeSession | None, node: Node | None) -> _Answer:
    if session is None or node is None:
        return _Answer("not asked")
    try:
        status = await session.status(NODE_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            return _Answer("no answer", f"not within {NODE_TIMEOUT_S:g} s")
        reason = f"{error.code().name.lower()}: {error.details() or ''}"
        return _Answer("no answer", reason[:_REASON_CHARACTERS])
    if status.instance_id != node.instance_id:
        return _Answer("no answer", "it restarted meanwhile")
    return _Answer("ok", status=status)


def _proxy(flow: Flow, served: Served, uptime_s: float, worker: tuple[int, int]) -> schema.ProxyDocument:
    reason = flow.not_ready_because()
    ttft_count, ttft_sum_s = metrics.count_and_sum(flow.metrics.ttft)
    gap_count, gap_sum_s = metrics.count_and_sum(flow.metrics.attempt_gap)
    return schema.ProxyDocument(
        version=metadata.version("lockstep"),
        uptime_s=uptime_s,
        ready=not reason,
        not_ready_because=reason,
        served_models=list(served.models),
        served_context_limit_tokens=served.context_limit_tokens,
        in_flight_requests=flow.num_in_flight,
        queued_requests=flow.num_queued,
        ttft_count=ttft_count,
        ttft_sum_s=ttft_sum_s,
        attempt_gap_count=gap_count,
        attempt_gap_sum_s=gap_sum_s,
        request_timeout_s=flow.request_timeout_s,
        worker=worker[0],
        workers=worker[1],
        **_counts(flow.metrics),
    )


def _counts(proxy_metrics: ProxyMetrics) -> dict[str, dict[str, int]]:
    return {
        "requests_by_outcome": {k: int(n) for (k,), n in metrics.values(proxy_metrics.requests).items()},
        "attempts_by_reason": {k: int(n) for (k,), n in metrics.values(proxy_metrics.attempts).items()},
    }


def _node(
    entry: Listed, answer: _Answer, keys: Sequence[CompatibilityKey], loads: dict[int, RankLoad]
) -> schema.NodeDocument:
    node, status = entry.node, answer.status
    by_rank = {rank.global_rank: rank for rank in status.ranks} if status else {}
    return schema.NodeDocument(
        address=entry.address,
        role=entry.role,
        state=entry.state,
        reason=entry.reason,
        answer=answer.kind,
        answer_reason=answer.reason,
        instance_id=node.instance_id if node else "",
        group_id=node.group_id if node else "",
        compatibility_group=keys.index(node.key) if node else None,
        description=_description(node.description) if node else None,
        counts_age_s=status.age_s if status else None,
        sessions=status.num_sessions if status else None,
        ranks=[
            _rank(rank, described.num_kv_blocks, loads.get(rank.local_rank), by_rank.get(rank.global_rank))
            for rank, described in zip(node.ranks, node.description.ranks, strict=True)
        ]
        if node
        else [],
    )


def _description(described: pb.NodeDescription) -> schema.DescriptionDocument:
    return schema.DescriptionDocument(
        model=described.model,
        dtype=described.dtype,
        num_speculative_tokens=described.num_speculative_tokens,
        speculative_method=described.speculative_method,
        block_size_tokens=described.block_size,
        served_context_limit_tokens=described.served_context_limit,
        max_model_len_tokens=described.max_model_len,
        runner=described.runner,
        versions=schema.Versions(
            lockstep=described.lockstep_version,
            vllm=described.vllm_version,
            nixl=described.nixl_version,
            connector=described.connector_version,
        ),
    )


def _rank(
    rank: Rank, kv_blocks: int, load: RankLoad | None, status: pb.RankStatus | None
) -> schema.RankDocument:
    return schema.RankDocument(
        global_rank=rank.global_rank,
        local_rank=rank.local_rank,
        engine_id=rank.engine_id,
        max_num_seqs=rank.max_num_seqs,
        kv_blocks=kv_blocks,
        in_flight_requests=load.in_flight if load else 0,
        outstanding_prompt_tokens=load.outstanding_tokens if load else 0,
        window_tokens=load.window_tokens if load else None,
        counts=_rank_counts(status) if status else None,
    )


def _rank_counts(status: pb.RankStatus) -> schema.RankCounts:
    kv = status.kv
    return schema.RankCounts(
        running_requests=status.load.num_running,
        waiting_requests=status.load.num_waiting,
        kv_cache_usage_ratio=status.load.kv_cache_usage,
        steps=[schema.StepCount(step.mode, step.cause, step.count, step.origin) for step in status.steps],
        dropped_step_records=status.step_records_dropped,
        draft_tokens=status.draft_tokens,
        accepted_tokens=status.accepted_tokens,
        kv=schema.KVCounts(
            pushed_requests=kv.pushed_requests,
            pushed_blocks=kv.pushed_blocks,
            pushed_bytes=kv.pushed_bytes,
            received_requests=kv.received_requests,
            received_blocks=kv.received_blocks,
            # The writer of the bytes counts them (NIXL's telemetry); the reader only knows its blocks.
            received_bytes=kv.received_blocks * kv.bytes_per_block,
            events=[schema.KVEvent(event.kind, event.reason, event.count) for event in kv.events],
            block_bytes=kv.bytes_per_block,
            quarantined_blocks=kv.quarantined_blocks,
            quarantined_requests=kv.quarantined_requests,
        ),
        scheduler=_scheduler_counts(status.scheduler) if status.HasField("scheduler") else None,
    )


def _scheduler_counts(counted: pb.SchedulerStatus) -> schema.SchedulerCounts:
    return schema.SchedulerCounts(
        padded_arrivals=counted.padded_arrivals,
        hand_offs=counted.hand_offs,
        handed_over_drafts=counted.handed_over_drafts,
        reentries=counted.reentries,
        placeholder_drafts=counted.placeholder_drafts,
        bounced_by_reason=dict(counted.bounced),
        violations_by_cause=dict(counted.violations),
    )


def _serves(flow: Flow, key: CompatibilityKey) -> bool:
    """Whether the front end uses pairs of this key, those that are away for now too."""
    prefill, decode = flow.cluster.known("prefill"), flow.cluster.known("decode")
    return any(node.key == key for node in prefill) and any(node.key == key for node in decode)


def _group(
    number: int, key: CompatibilityKey, served: bool, listed: Iterable[Listed]
) -> schema.CompatibilityGroup:
    members = [entry for entry in listed if entry.node is not None and entry.node.key == key]
    return schema.CompatibilityGroup(
        number=number,
        served=served,
        key=asdict(key),
        prefill=[entry.address for entry in members if entry.role == "prefill"],
        decode=[entry.address for entry in members if entry.role == "decode"],
    )
