"""A status document in which every number is another one."""

from dataclasses import replace
from typing import Any

from lockstep.status import (
    SCHEMA_VERSION,
    CompatibilityGroup,
    DescriptionDocument,
    KVCounts,
    NodeDocument,
    ProxyDocument,
    RankCounts,
    RankDocument,
    StatusDocument,
    StepCount,
    Versions,
)

DESCRIPTION = DescriptionDocument(
    model="pico",
    dtype="float32",
    num_speculative_tokens=2,
    speculative_method="mtp",
    block_size_tokens=128,
    served_context_limit_tokens=2043,
    max_model_len_tokens=2048,
    runner="V1",
    versions=Versions(lockstep="0.1.0", vllm="0.32.0", nixl="1.5.1", connector="14.1"),
)

KV = KVCounts(
    pushed_requests=0,
    pushed_blocks=0,
    pushed_bytes=0,
    received_requests=0,
    received_blocks=0,
    received_bytes=0,
    events=[],
    block_bytes=655360,
    quarantined_blocks=0,
    quarantined_requests=0,
)

COUNTS = RankCounts(
    running_requests=3,
    waiting_requests=1,
    kv_cache_usage_ratio=0.25,
    steps=[],
    dropped_step_records=0,
    draft_tokens=0,
    accepted_tokens=0,
    kv=KV,
)

BUSY = replace(
    COUNTS,
    steps=[
        StepCount("FULL", "", 99_999),
        StepCount("NONE", "short_row", 3, "own"),
        StepCount("NONE", "peer", 7, "peer"),
        StepCount("PIECEWISE", "peer", 1, "peer"),
    ],
    draft_tokens=200,
    accepted_tokens=150,
    kv=replace(KV, received_bytes=5_242_880),
)


def rank(number: int, counts: RankCounts | None = COUNTS, in_flight: int = 0) -> RankDocument:
    return RankDocument(
        global_rank=number,
        local_rank=number,
        engine_id=f"engine_dp{number}",
        max_num_seqs=8,
        kv_blocks=100,
        in_flight_requests=in_flight,
        outstanding_prompt_tokens=0,
        window_tokens=4096,
        counts=counts,
    )


def node(role: Any, address: str, ranks: list[RankDocument], **changed: Any) -> NodeDocument:
    whole = NodeDocument(
        address=address,
        role=role,
        state="live",
        reason="",
        answer="ok",
        answer_reason="",
        instance_id="f00",
        group_id="g",
        compatibility_group=0,
        description=DESCRIPTION,
        counts_age_s=0.5,
        sessions=1,
        ranks=ranks,
    )
    return replace(whole, **changed)


def document(nodes: list[NodeDocument], **proxy: Any) -> StatusDocument:
    whole = ProxyDocument(
        version="0.1.0",
        uptime_s=185.0,
        ready=True,
        not_ready_because="",
        served_models=["pico"],
        served_context_limit_tokens=2043,
        in_flight_requests=5,
        queued_requests=2,
        requests_by_outcome={"stop": 12, "length": 0, "disconnected": 1},
        attempts_by_reason={"first": 18},
        ttft_count=4,
        ttft_sum_s=0.34,
    )
    return StatusDocument(
        schema_version=SCHEMA_VERSION,
        proxy=replace(whole, **proxy),
        nodes=nodes,
        compatibility_groups=[CompatibilityGroup(0, True, {"model": "pico"}, ["p:1"], ["d:1"])],
    )


def usual() -> StatusDocument:
    """One prefill node and one decode node with two ranks."""
    pushing = replace(COUNTS, kv=replace(KV, pushed_bytes=1_310_720))
    return document(
        [
            node("prefill", "p:1", [rank(0, pushing)]),
            node("decode", "d:1", [rank(0, in_flight=4), rank(1, BUSY)]),
        ]
    )
