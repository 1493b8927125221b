from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeDescription(_message.Message):
    __slots__ = ("protocol_version", "role", "group_id", "instance_id", "ready", "model", "revision", "tokenizer", "tokenizer_hash", "generation_config_hash", "dtype", "kv_cache_dtype", "block_size", "served_context_limit", "max_model_len", "num_speculative_tokens", "speculative_method", "speculative_config", "trust_remote_code", "hash_seed", "hash_algorithm", "vllm_version", "nixl_version", "connector_version", "lockstep_version", "runner", "generation_config", "ranks", "engine")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_CONFIG_HASH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    SERVED_CONTEXT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_METHOD_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_CONFIG_FIELD_NUMBER: _ClassVar[int]
    TRUST_REMOTE_CODE_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    VLLM_VERSION_FIELD_NUMBER: _ClassVar[int]
    NIXL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_VERSION_FIELD_NUMBER: _ClassVar[int]
    LOCKSTEP_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_CONFIG_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    role: Role
    group_id: str
    instance_id: str
    ready: bool
    model: str
    revision: str
    tokenizer: str
    tokenizer_hash: str
    generation_config_hash: str
    dtype: str
    kv_cache_dtype: str
    block_size: int
    served_context_limit: int
    max_model_len: int
    num_speculative_tokens: int
    speculative_method: str
    speculative_config: str
    trust_remote_code: bool
    hash_seed: str
    hash_algorithm: str
    vllm_version: str
    nixl_version: str
    connector_version: str
    lockstep_version: str
    runner: str
    generation_config: str
    ranks: _containers.RepeatedCompositeFieldContainer[RankDescription]
    engine: EngineSettings
    def __init__(self, protocol_version: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., group_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., ready: _Optional[bool] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., tokenizer: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., generation_config_hash: _Optional[str] = ..., dtype: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., served_context_limit: _Optional[int] = ..., max_model_len: _Optional[int] = ..., num_speculative_tokens: _Optional[int] = ..., speculative_method: _Optional[str] = ..., speculative_config: _Optional[str] = ..., trust_remote_code: _Optional[bool] = ..., hash_seed: _Optional[str] = ..., hash_algorithm: _Optional[str] = ..., vllm_version: _Optional[str] = ..., nixl_version: _Optional[str] = ..., connector_version: _Optional[str] = ..., lockstep_version: _Optional[str] = ..., runner: _Optional[str] = ..., generation_config: _Optional[str] = ..., ranks: _Optional[_Iterable[_Union[RankDescription, _Mapping]]] = ..., engine: _Optional[_Union[EngineSettings, _Mapping]] = ...) -> None: ...

class EngineSettings(_message.Message):
    __slots__ = ("scheduler_cls", "async_scheduling", "cudagraph_mode", "full_graph_tokens", "max_num_scheduled_tokens", "long_prefill_token_threshold", "kv_lease_s", "kv_lease_renewal_s", "registration_deadline_s", "kv_load_failure_policy", "arrival_padding", "strict", "records_steps", "data_parallel_size", "pipeline_parallel_size", "device")
    SCHEDULER_CLS_FIELD_NUMBER: _ClassVar[int]
    ASYNC_SCHEDULING_FIELD_NUMBER: _ClassVar[int]
    CUDAGRAPH_MODE_FIELD_NUMBER: _ClassVar[int]
    FULL_GRAPH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SCHEDULED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LONG_PREFILL_TOKEN_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    KV_LEASE_S_FIELD_NUMBER: _ClassVar[int]
    KV_LEASE_RENEWAL_S_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    KV_LOAD_FAILURE_POLICY_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_PADDING_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    RECORDS_STEPS_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    scheduler_cls: str
    async_scheduling: bool
    cudagraph_mode: str
    full_graph_tokens: _containers.RepeatedScalarFieldContainer[int]
    max_num_scheduled_tokens: int
    long_prefill_token_threshold: int
    kv_lease_s: float
    kv_lease_renewal_s: float
    registration_deadline_s: float
    kv_load_failure_policy: str
    arrival_padding: bool
    strict: bool
    records_steps: bool
    data_parallel_size: int
    pipeline_parallel_size: int
    device: str
    def __init__(self, scheduler_cls: _Optional[str] = ..., async_scheduling: _Optional[bool] = ..., cudagraph_mode: _Optional[str] = ..., full_graph_tokens: _Optional[_Iterable[int]] = ..., max_num_scheduled_tokens: _Optional[int] = ..., long_prefill_token_threshold: _Optional[int] = ..., kv_lease_s: _Optional[float] = ..., kv_lease_renewal_s: _Optional[float] = ..., registration_deadline_s: _Optional[float] = ..., kv_load_failure_policy: _Optional[str] = ..., arrival_padding: _Optional[bool] = ..., strict: _Optional[bool] = ..., records_steps: _Optional[bool] = ..., data_parallel_size: _Optional[int] = ..., pipeline_parallel_size: _Optional[int] = ..., device: _Optional[str] = ...) -> None: ...

class RankDescription(_message.Message):
    __slots__ = ("global_rank", "local_rank", "engine_id", "side_channel_host", "side_channel_port", "tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "num_kv_blocks")
    GLOBAL_RANK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    SIDE_CHANNEL_HOST_FIELD_NUMBER: _ClassVar[int]
    SIDE_CHANNEL_PORT_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    global_rank: int
    local_rank: int
    engine_id: str
    side_channel_host: str
    side_channel_port: int
    tensor_parallel_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_kv_blocks: int
    def __init__(self, global_rank: _Optional[int] = ..., local_rank: _Optional[int] = ..., engine_id: _Optional[str] = ..., side_channel_host: _Optional[str] = ..., side_channel_port: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., num_kv_blocks: _Optional[int] = ...) -> None: ...

class ProxyFrame(_message.Message):
    __slots__ = ("hello", "add", "abort", "kv_blocks", "decode_engines")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DECODE_ENGINES_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    add: AddRequest
    abort: AbortRequests
    kv_blocks: KVBlocksRequest
    decode_engines: DecodeEngines
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., add: _Optional[_Union[AddRequest, _Mapping]] = ..., abort: _Optional[_Union[AbortRequests, _Mapping]] = ..., kv_blocks: _Optional[_Union[KVBlocksRequest, _Mapping]] = ..., decode_engines: _Optional[_Union[DecodeEngines, _Mapping]] = ...) -> None: ...

class DecodeEngines(_message.Message):
    __slots__ = ("engine_ids",)
    ENGINE_IDS_FIELD_NUMBER: _ClassVar[int]
    engine_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, engine_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "proxy_id")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROXY_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    proxy_id: str
    def __init__(self, protocol_version: _Optional[int] = ..., proxy_id: _Optional[str] = ...) -> None: ...

class AddRequest(_message.Message):
    __slots__ = ("request_id", "rank", "request")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    rank: int
    request: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, request_id: _Optional[str] = ..., rank: _Optional[int] = ..., request: _Optional[_Iterable[bytes]] = ...) -> None: ...

class AbortRequests(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class NodeFrame(_message.Message):
    __slots__ = ("welcome", "step", "load", "records", "error", "draining", "kv_blocks")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    step: StepOutputs
    load: RankLoad
    records: StepRecords
    error: RequestError
    draining: Draining
    kv_blocks: KVBlocks
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., step: _Optional[_Union[StepOutputs, _Mapping]] = ..., load: _Optional[_Union[RankLoad, _Mapping]] = ..., records: _Optional[_Union[StepRecords, _Mapping]] = ..., error: _Optional[_Union[RequestError, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., kv_blocks: _Optional[_Union[KVBlocks, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("instance_id", "loads")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    loads: _containers.RepeatedCompositeFieldContainer[RankLoad]
    def __init__(self, instance_id: _Optional[str] = ..., loads: _Optional[_Iterable[_Union[RankLoad, _Mapping]]] = ...) -> None: ...

class StepOutputs(_message.Message):
    __slots__ = ("rank", "outputs", "load")
    RANK_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    rank: int
    outputs: _containers.RepeatedScalarFieldContainer[bytes]
    load: RankLoad
    def __init__(self, rank: _Optional[int] = ..., outputs: _Optional[_Iterable[bytes]] = ..., load: _Optional[_Union[RankLoad, _Mapping]] = ...) -> None: ...

class RankLoad(_message.Message):
    __slots__ = ("rank", "num_running", "num_waiting", "kv_cache_usage")
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    def __init__(self, rank: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ...) -> None: ...

class StepRecords(_message.Message):
    __slots__ = ("rank", "records", "dropped")
    RANK_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    records: _containers.RepeatedCompositeFieldContainer[StepRecord]
    dropped: int
    def __init__(self, rank: _Optional[int] = ..., records: _Optional[_Iterable[_Union[StepRecord, _Mapping]]] = ..., dropped: _Optional[int] = ...) -> None: ...

class StepRecord(_message.Message):
    __slots__ = ("step", "mode", "width", "rows", "tokens", "padded_tokens", "dummy", "cause")
    STEP_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PADDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DUMMY_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    step: int
    mode: str
    width: int
    rows: int
    tokens: int
    padded_tokens: int
    dummy: bool
    cause: str
    def __init__(self, step: _Optional[int] = ..., mode: _Optional[str] = ..., width: _Optional[int] = ..., rows: _Optional[int] = ..., tokens: _Optional[int] = ..., padded_tokens: _Optional[int] = ..., dummy: _Optional[bool] = ..., cause: _Optional[str] = ...) -> None: ...

class KVBlocks(_message.Message):
    __slots__ = ("rank", "number", "snapshot", "stored", "removed")
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    number: int
    snapshot: bool
    stored: bytes
    removed: bytes
    def __init__(self, rank: _Optional[int] = ..., number: _Optional[int] = ..., snapshot: _Optional[bool] = ..., stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ...) -> None: ...

class KVBlocksRequest(_message.Message):
    __slots__ = ("rank",)
    RANK_FIELD_NUMBER: _ClassVar[int]
    rank: int
    def __init__(self, rank: _Optional[int] = ...) -> None: ...

class RequestError(_message.Message):
    __slots__ = ("request_id", "code", "message")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    code: str
    message: str
    def __init__(self, request_id: _Optional[str] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("deadline_s", "move")
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    deadline_s: float
    move: bool
    def __init__(self, deadline_s: _Optional[float] = ..., move: _Optional[bool] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_s", "move")
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    move: bool
    def __init__(self, timeout_s: _Optional[float] = ..., move: _Optional[bool] = ...) -> None: ...

class DrainProgress(_message.Message):
    __slots__ = ("num_requests", "left_s", "done", "num_moved", "waits_for")
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    NUM_MOVED_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    left_s: float
    done: bool
    num_moved: int
    waits_for: str
    def __init__(self, num_requests: _Optional[int] = ..., left_s: _Optional[float] = ..., done: _Optional[bool] = ..., num_moved: _Optional[int] = ..., waits_for: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("instance_id", "age_s", "num_sessions", "ranks")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    age_s: float
    num_sessions: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankStatus]
    def __init__(self, instance_id: _Optional[str] = ..., age_s: _Optional[float] = ..., num_sessions: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankStatus, _Mapping]]] = ...) -> None: ...

class RankStatus(_message.Message):
    __slots__ = ("global_rank", "load", "steps", "step_records_dropped", "draft_tokens", "accepted_tokens", "kv", "scheduler")
    GLOBAL_RANK_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_RECORDS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    global_rank: int
    load: RankLoad
    steps: _containers.RepeatedCompositeFieldContainer[StepCount]
    step_records_dropped: int
    draft_tokens: int
    accepted_tokens: int
    kv: KVStatus
    scheduler: SchedulerStatus
    def __init__(self, global_rank: _Optional[int] = ..., load: _Optional[_Union[RankLoad, _Mapping]] = ..., steps: _Optional[_Iterable[_Union[StepCount, _Mapping]]] = ..., step_records_dropped: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., kv: _Optional[_Union[KVStatus, _Mapping]] = ..., scheduler: _Optional[_Union[SchedulerStatus, _Mapping]] = ...) -> None: ...

class SchedulerStatus(_message.Message):
    __slots__ = ("padded_arrivals", "placeholder_drafts", "bounced", "violations", "reentries", "hand_offs", "handed_over_drafts")
    class BouncedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ViolationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PADDED_ARRIVALS_FIELD_NUMBER: _ClassVar[int]
    PLACEHOLDER_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    BOUNCED_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    REENTRIES_FIELD_NUMBER: _ClassVar[int]
    HAND_OFFS_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    padded_arrivals: int
    placeholder_drafts: int
    bounced: _containers.ScalarMap[str, int]
    violations: _containers.ScalarMap[str, int]
    reentries: int
    hand_offs: int
    handed_over_drafts: int
    def __init__(self, padded_arrivals: _Optional[int] = ..., placeholder_drafts: _Optional[int] = ..., bounced: _Optional[_Mapping[str, int]] = ..., violations: _Optional[_Mapping[str, int]] = ..., reentries: _Optional[int] = ..., hand_offs: _Optional[int] = ..., handed_over_drafts: _Optional[int] = ...) -> None: ...

class StepCount(_message.Message):
    __slots__ = ("mode", "cause", "count", "origin")
    MODE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    mode: str
    cause: str
    count: int
    origin: str
    def __init__(self, mode: _Optional[str] = ..., cause: _Optional[str] = ..., count: _Optional[int] = ..., origin: _Optional[str] = ...) -> None: ...

class KVStatus(_message.Message):
    __slots__ = ("pushed_requests", "pushed_blocks", "pushed_bytes", "received_requests", "received_blocks", "events", "bytes_per_block", "quarantined_blocks", "quarantined_requests")
    PUSHED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PUSHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PUSHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    pushed_requests: int
    pushed_blocks: int
    pushed_bytes: int
    received_requests: int
    received_blocks: int
    events: _containers.RepeatedCompositeFieldContainer[KVEvent]
    bytes_per_block: int
    quarantined_blocks: int
    quarantined_requests: int
    def __init__(self, pushed_requests: _Optional[int] = ..., pushed_blocks: _Optional[int] = ..., pushed_bytes: _Optional[int] = ..., received_requests: _Optional[int] = ..., received_blocks: _Optional[int] = ..., events: _Optional[_Iterable[_Union[KVEvent, _Mapping]]] = ..., bytes_per_block: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., quarantined_requests: _Optional[int] = ...) -> None: ...

class KVEvent(_message.Message):
    __slots__ = ("kind", "reason", "count")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    reason: str
    count: int
    def __init__(self, kind: _Optional[str] = ..., reason: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...
