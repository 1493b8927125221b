"""The schema of the document that a proxy's GET /lockstep/status answers with; docs/metrics.md describes it.

Fields may be added; none is renamed or given another meaning without a new `schema_version`. Readers ignore
fields that they do not know.
"""

from dataclasses import dataclass
from typing import Literal

STATUS_PATH = "/lockstep/status"
SCHEMA_VERSION = 1

NodeState = Literal["live", "aside", "away", "refused"]
Answer = Literal["ok", "no answer", "not asked"]


@dataclass(frozen=True, slots=True)
class StepCount:
    """Engine steps that were dispatched alike; `origin` is "own", "peer", or "" for a full graph."""

    mode: str
    cause: str
    count: int
    origin: str = ""


@dataclass(frozen=True, slots=True)
class SchedulerCounts:
    """What the scheduler of a decode rank has counted."""

    hand_offs: int
    handed_over_drafts: int
    padded_arrivals: int
    reentries: int
    placeholder_drafts: int
    bounced_by_reason: dict[str, int]
    violations_by_cause: dict[str, int]


@dataclass(frozen=True, slots=True)
class KVEvent:
    """Something that is not a plain push or receive."""

    kind: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class KVCounts:
    """What the KV connector of a rank has counted."""

    pushed_requests: int
    pushed_blocks: int
    pushed_bytes: int
    received_requests: int
    received_blocks: int
    received_bytes: int
    events: list[KVEvent]
    block_bytes: int
    quarantined_blocks: int
    quarantined_requests: int


@dataclass(frozen=True, slots=True)
class RankCounts:
    """What a node says of one rank: its load, and totals since the node's process started."""

    running_requests: int
    waiting_requests: int
    kv_cache_usage_ratio: float
    steps: list[StepCount]
    dropped_step_records: int
    draft_tokens: int
    accepted_tokens: int
    kv: KVCounts
    scheduler: SchedulerCounts | None = None


@dataclass(frozen=True, slots=True)
class RankDocument:
    """One data-parallel rank; `counts` is null unless its node answered."""

    global_rank: int
    local_rank: int
    engine_id: str
    max_num_seqs: int
    kv_blocks: int
    in_flight_requests: int
    outstanding_prompt_tokens: int
    window_tokens: int | None
    counts: RankCounts | None


@dataclass(frozen=True, slots=True)
class Versions:
    """What the node runs."""

    lockstep: str
    vllm: str
    nixl: str
    connector: str


@dataclass(frozen=True, slots=True)
class DescriptionDocument:
    """What the node serves."""

    model: str
    dtype: str
    num_speculative_tokens: int
    speculative_method: str
    block_size_tokens: int
    served_context_limit_tokens: int
    max_model_len_tokens: int
    runner: str
    versions: Versions


@dataclass(frozen=True, slots=True)
class NodeDocument:
    """One listed node. What it described is kept while it is away, and null before its first connect."""

    address: str
    role: Literal["prefill", "decode"]
    state: NodeState
    reason: str
    answer: Answer
    answer_reason: str
    instance_id: str
    group_id: str
    compatibility_group: int | None
    description: DescriptionDocument | None
    counts_age_s: float | None
    sessions: int | None
    ranks: list[RankDocument]


@dataclass(frozen=True, slots=True)
class CompatibilityGroup:
    """Nodes whose KV fits each other, and the fields in which they are equal."""

    number: int
    served: bool
    key: dict[str, str | int]
    prefill: list[str]
    decode: list[str]


@dataclass(frozen=True, slots=True)
class ProxyDocument:
    """What this proxy knows of itself; other proxies of the same nodes count for themselves."""

    version: str
    uptime_s: float
    ready: bool
    not_ready_because: str
    served_models: list[str]
    served_context_limit_tokens: int
    in_flight_requests: int
    queued_requests: int
    requests_by_outcome: dict[str, int]
    attempts_by_reason: dict[str, int]
    ttft_count: int
    ttft_sum_s: float
    # What an older proxy of this schema's version does not send.
    attempt_gap_count: int = 0
    attempt_gap_sum_s: float = 0.0
    request_timeout_s: float | None = None
    worker: int = 1
    workers: int = 1


@dataclass(frozen=True, slots=True)
class StatusDocument:
    """The whole answer."""

    schema_version: int
    proxy: ProxyDocument
    nodes: list[NodeDocument]
    compatibility_groups: list[CompatibilityGroup]
