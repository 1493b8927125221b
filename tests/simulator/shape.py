"""What one simulated decode rank is built from: limits, and vLLM's real scheduler for them."""

import copy
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.structured_output import StructuredOutputManager

from decode_node.limits import served_context_limit
from decode_node.scheduler import LockstepScheduler, LockstepSyncScheduler
from kv_transfer.config import kv_transfer_config

PICO = Path(__file__).parents[2] / "models" / "pico"
BLOCK_SIZE = 4
"""Small, so that short requests meet many block edges."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of both ranks of one group.

    Attributes:
        spare_blocks: KV blocks beyond the fewest that hold one request of any served length.
        scheduler: ours, or vLLM's own for the same mode.
        connector: ours, vLLM's push connector as under a plain server, or none.
        reports_ids: whether a failed receive is also reported by request id, or by its blocks only, as by an
            executor of several processes.
    """

    num_speculative_tokens: int = 2
    asynchronous: bool = True
    max_num_seqs: int = 4
    max_model_len: int = 48
    spare_blocks: int = 100
    scheduler: Literal["lockstep", "stock"] = "lockstep"
    connector: Literal["lockstep", "stock", "none"] = "lockstep"
    reports_ids: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    arrival_padding: bool = True
    strict: bool = True
    long_prefill_token_threshold: int = 0

    @property
    def width(self) -> int:
        return 1 + self.num_speculative_tokens

    @property
    def context_limit(self) -> int:
        return served_context_limit(self.vllm_config(0))

    @property
    def num_blocks(self) -> int:
        """With vLLM's null block and those that a load keeps free for one step (scheduler.py:1247)."""
        step_tokens = self.width + self.num_speculative_tokens if self.num_speculative_tokens else 0
        return 1 + cdiv(self.max_model_len, BLOCK_SIZE) + cdiv(step_tokens, BLOCK_SIZE) + self.spare_blocks

    def vllm_config(self, rank: int) -> VllmConfig:
        config = copy.copy(_base_config(self.num_speculative_tokens))
        for name in ("model_config", "cache_config", "scheduler_config"):
            setattr(config, name, copy.copy(getattr(config, name)))
        config.model_config.max_model_len = self.max_model_len
        config.cache_config.block_size = BLOCK_SIZE
        config.cache_config.num_gpu_blocks = self.num_blocks
        scheduler = config.scheduler_config
        scheduler.async_scheduling = self.asynchronous
        scheduler.max_num_seqs = self.max_num_seqs
        scheduler.max_num_batched_tokens = scheduler.max_num_scheduled_tokens = self.max_num_seqs * self.width
        scheduler.policy = self.policy
        scheduler.long_prefill_token_threshold = self.long_prefill_token_threshold
        config.additional_config = {
            "lockstep": {"strict": self.strict, "arrival_padding": self.arrival_padding}
        }
        if self.connector == "lockstep":
            transfer = kv_transfer_config("decode", kv_buffer_device="cpu", engine_id=f"decode-{rank}")
            config.kv_transfer_config = KVTransferConfig(**transfer)
        elif self.connector == "stock":
            config.kv_transfer_config = KVTransferConfig(
                kv_connector="NixlPushConnector", kv_role="kv_consumer"
            )
        return config

    def make_scheduler(self, rank: int) -> Any:
        """As vLLM's engine core makes it (vllm/v1/engine/core.py:172)."""
        config = self.vllm_config(rank)
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=64, dtype=torch.float32)
        kv_cache_config = KVCacheConfig(
            num_blocks=self.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        return self._scheduler_cls(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=_structured_output_manager(self.num_speculative_tokens),
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            include_finished_set=True,
            log_stats=True,
        )

    @property
    def _scheduler_cls(self) -> Any:
        if self.scheduler == "stock":
            return AsyncScheduler if self.asynchronous else Scheduler
        return LockstepScheduler if self.asynchronous else LockstepSyncScheduler


@functools.cache
def _base_config(num_speculative_tokens: int) -> VllmConfig:
    init_none_hash(sha256)
    speculative = {"method": "mtp", "num_speculative_tokens": num_speculative_tokens}
    return EngineArgs(
        model=str(PICO),
        dtype="float32",
        max_model_len=256,
        speculative_config=speculative if num_speculative_tokens else None,
    ).create_engine_config()


@functools.cache
def _structured_output_manager(num_speculative_tokens: int) -> StructuredOutputManager:
    return StructuredOutputManager(_base_config(num_speculative_tokens))
