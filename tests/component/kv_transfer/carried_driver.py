"""Drives vLLM's real scheduler with carried tokens for the tests; each step's tokens are given by hand."""

from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kv_transfer.carried.vllm_schedulers import CarriedSyncScheduler

PICO = Path(__file__).parents[3] / "models" / "pico"
BLOCK_SIZE = 16
NUM_BLOCKS = 20
BUDGET = 32
MAX_MODEL_LEN = 256


def vllm_config() -> VllmConfig:
    init_none_hash(sha256)
    config = EngineArgs(
        model=str(PICO),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=8,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    return config


def request(request_id: str, prompt: list[int], transfer: dict[str, Any] | None, **sampling: Any) -> Request:
    extra = None if transfer is None else {"kv_transfer_params": transfer}
    params = SamplingParams(**{"ignore_eos": True, "extra_args": extra} | sampling)
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=params,
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )


class Driver:
    """One scheduler; `step` is one engine step without a model, a sampled token for each row that is done."""

    def __init__(self, config: VllmConfig, scheduler_class: type[Scheduler] = CarriedSyncScheduler) -> None:
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=64, dtype=torch.float32)
        self.manager = StructuredOutputManager(config)
        self.scheduler = scheduler_class(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=NUM_BLOCKS,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=self.manager,
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            log_stats=True,
        )

    def step(
        self, token: int = 7, report: KVConnectorOutput | None = None
    ) -> tuple[Any, list[EngineCoreOutput]]:
        """Returns (what was scheduled, outputs for the client)."""
        scheduled = self.scheduler.schedule()
        ids = list(scheduled.num_scheduled_tokens)
        sampled = [[] if self.scheduler.requests[i].is_prefill_chunk else [token] for i in ids]
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=report,
        )
        outputs = self.scheduler.update_from_output(scheduled, output)
        return scheduled, [o for eco in outputs.values() for o in eco.outputs]

    def close(self) -> None:
        self.scheduler.shutdown()
        self.manager.clear_backend()
