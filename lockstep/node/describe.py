"""Describes a node to proxies: everything that decides which peers fit it, read from what vLLM resolved."""

import hashlib
import json
import os
import uuid
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import vllm
from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.tokenizers import get_tokenizer
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

from lockstep.node.config import NodeConfig
from lockstep.node.facts import EngineFacts
from lockstep.node.flags import SETTINGS_KEY
from lockstep.node.role import Role
from lockstep.rpc.channel import PROTOCOL_VERSION
from lockstep.rpc.generated import lockstep_pb2 as pb

_ROLES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE}


def describe(
    role: Role,
    config: NodeConfig,
    vllm_config: VllmConfig,
    facts: Sequence[EngineFacts],
    global_ranks: Sequence[int],
) -> pb.NodeDescription:
    """Build the answer to Describe from the configuration and what each rank made of it."""
    model = vllm_config.model_config
    speculative = vllm_config.speculative_config
    kv_transfer = vllm_config.kv_transfer_config
    return pb.NodeDescription(
        protocol_version=PROTOCOL_VERSION,
        role=_ROLES[role.name],
        group_id=config.group_id or kv_transfer.engine_id,
        instance_id=uuid.uuid4().hex,
        model=model.model,
        revision=model.revision or "",
        tokenizer=model.tokenizer,
        tokenizer_hash=_tokenizer_hash(vllm_config),
        generation_config_hash=_digest(model.try_get_generation_config()),
        generation_config=model.generation_config,
        dtype=str(model.dtype).removeprefix("torch."),
        kv_cache_dtype=str(vllm_config.cache_config.cache_dtype),
        block_size=vllm_config.cache_config.block_size,
        served_context_limit=role.served_context_limit(vllm_config),
        max_model_len=model.max_model_len,
        num_speculative_tokens=speculative.num_speculative_tokens if speculative else 0,
        speculative_method=speculative.method if speculative else "",
        speculative_config=_speculative_json(vllm_config),
        trust_remote_code=model.trust_remote_code,
        hash_seed=_hash_seed(vllm_config),
        hash_algorithm=vllm_config.cache_config.prefix_caching_hash_algo,
        vllm_version=vllm.__version__,
        nixl_version=metadata.version("nixl"),
        connector_version=role.connector_version,
        lockstep_version=metadata.version("lockstep"),
        runner="V2" if vllm_config.use_v2_model_runner else "V1",
        ranks=[
            _rank(vllm_config, index, rank, facts[index].num_kv_blocks)
            for index, rank in enumerate(global_ranks)
        ],
        engine=_engine(config, vllm_config, facts[0]),
    )


def _engine(config: NodeConfig, vllm_config: VllmConfig, facts: EngineFacts) -> pb.EngineSettings:
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    settings = vllm_config.additional_config.get(SETTINGS_KEY, {})
    return pb.EngineSettings(
        scheduler_cls=facts.scheduler_cls,
        async_scheduling=facts.async_scheduling,
        cudagraph_mode=facts.cudagraph_mode,
        full_graph_tokens=facts.full_graph_tokens,
        # None without speculation: vLLM's scheduler then takes the other one (v1/core/sched/scheduler.py).
        max_num_scheduled_tokens=scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
        long_prefill_token_threshold=scheduler.long_prefill_token_threshold,
        kv_lease_s=config.kv_lease_s,
        kv_lease_renewal_s=config.kv_lease_s // 6,  # nixl/base_scheduler.py:88
        registration_deadline_s=config.registration_deadline_s,
        kv_load_failure_policy=vllm_config.kv_transfer_config.kv_load_failure_policy,
        arrival_padding=settings.get("arrival_padding", True),
        strict=settings.get("strict", False),
        records_steps=facts.records_steps,
        data_parallel_size=parallel.data_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        device=current_platform.device_type,
    )


def _rank(
    vllm_config: VllmConfig, local_rank: int, global_rank: int, num_kv_blocks: int
) -> pb.RankDescription:
    parallel = vllm_config.parallel_config
    engine_id = vllm_config.kv_transfer_config.engine_id
    if parallel.data_parallel_size > 1:
        engine_id = f"{engine_id}_dp{global_rank}"  # as vllm/v1/engine/core.py:1417 does
    return pb.RankDescription(
        global_rank=global_rank,
        local_rank=local_rank,
        engine_id=engine_id,
        side_channel_host=envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
        # nixl/base_scheduler.py:76
        side_channel_port=envs.VLLM_NIXL_SIDE_CHANNEL_PORT + global_rank,
        tensor_parallel_size=parallel.tensor_parallel_size,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        max_num_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        num_kv_blocks=num_kv_blocks,
    )


def _speculative_json(vllm_config: VllmConfig) -> str:
    speculative = vllm_config.speculative_config
    if speculative is None:
        return ""
    given = {
        "method": speculative.method,
        "num_speculative_tokens": speculative.num_speculative_tokens,
        "model": speculative.model,
    }
    return json.dumps({key: value for key, value in given.items() if value is not None}, sort_keys=True)


def _hash_seed(vllm_config: VllmConfig) -> str:
    """As each engine resolves it; empty where that is a random seed of its own (kv_cache_utils.py:131)."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if not algorithm.startswith("sha256") and "PYTHONHASHSEED" not in os.environ:
        return ""
    return str(resolve_none_hash_seed(get_hash_fn_by_name(algorithm)))


def _tokenizer_hash(vllm_config: VllmConfig) -> str:
    """Of what the tokenizer does, so that a hub id and a directory of the same tokenizer agree."""
    model = vllm_config.model_config
    tokenizer = get_tokenizer(
        model.tokenizer,
        tokenizer_mode=model.tokenizer_mode,
        trust_remote_code=model.trust_remote_code,
        revision=model.tokenizer_revision,
    )
    return _digest(
        {
            "vocabulary": sorted(tokenizer.get_vocab().items()),
            "special": sorted(map(str, tokenizer.all_special_tokens)),
            "chat_template": getattr(tokenizer, "chat_template", None),
        }
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
