"""A cluster in which nothing is wrong: one prefill node, one decode node with two ranks, a proxy."""

from typing import Any

from lockstep.doctor.described import Described
from lockstep.rpc.channel import PROTOCOL_VERSION
from lockstep.rpc.generated import lockstep_pb2 as pb

PREFILL_ADDRESS, DECODE_ADDRESS = "10.0.0.1:50051", "10.0.0.2:50051"

EQUAL: dict[str, Any] = {
    "protocol_version": PROTOCOL_VERSION,
    "ready": True,
    "model": "m",
    "tokenizer_hash": "t",
    "dtype": "bfloat16",
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "max_model_len": 512,
    "num_speculative_tokens": 2,
    "speculative_method": "mtp",
    "runner": "V1",
    "vllm_version": "0.32.0",
    "lockstep_version": "0.1.0",
}

ENGINE: dict[str, Any] = {
    "scheduler_cls": "decode_node.scheduler.LockstepScheduler",
    "async_scheduling": True,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "full_graph_tokens": [3, 6, 12],
    "max_num_scheduled_tokens": 12,
    "kv_lease_s": 30,
    "kv_lease_renewal_s": 5,
    "registration_deadline_s": 60,
    "kv_load_failure_policy": "fail",
    "arrival_padding": True,
    "records_steps": True,
    "data_parallel_size": 2,
    "pipeline_parallel_size": 1,
}


def rank(index: int, host: str, **changes: Any) -> pb.RankDescription:
    values: dict[str, Any] = {
        "global_rank": index,
        "local_rank": index,
        "engine_id": f"{host}_dp{index}",
        "side_channel_host": host,
        "side_channel_port": 5600 + index,
        "tensor_parallel_size": 1,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 12,
        "num_kv_blocks": 100,
    }
    return pb.RankDescription(**values | changes)


def decode(
    address: str = DECODE_ADDRESS, engine: dict[str, Any] | None = None, ranks: Any = None, **changes: Any
) -> Described:
    """`engine` and the others replace single values."""
    host = address.split(":")[0]
    values = EQUAL | {"role": pb.ROLE_DECODE, "group_id": address, "served_context_limit": 507} | changes
    described = ranks if ranks is not None else [rank(0, host), rank(1, host)]
    return Described(
        address,
        pb.NodeDescription(**values, engine=pb.EngineSettings(**ENGINE | (engine or {})), ranks=described),
    )


def prefill(
    address: str = PREFILL_ADDRESS, engine: dict[str, Any] | None = None, ranks: Any = None, **changes: Any
) -> Described:
    """As `decode`; what only decode is held to is left as vLLM has it on prefill."""
    own = {
        "scheduler_cls": "kv_transfer.carried.vllm_schedulers.CarriedAsyncScheduler",
        "cudagraph_mode": "NONE",
        "full_graph_tokens": [],
        "data_parallel_size": 1,
    }
    values = {"role": pb.ROLE_PREFILL, "served_context_limit": 512} | changes
    host = address.split(":")[0]
    return decode(address, own | (engine or {}), ranks if ranks is not None else [rank(0, host)], **values)
