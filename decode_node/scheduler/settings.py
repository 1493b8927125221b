"""What the scheduler is told, and what it needs of the engine that it runs in."""

from dataclasses import dataclass
from typing import Any

from vllm.utils.math_utils import cdiv

from lockstep.errors import ConfigError
from lockstep.node.flags import SETTINGS_KEY


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """The object at "lockstep" in vLLM's `--additional-config`."""

    strict: bool = False
    """A row of another width than 1 + K ends the engine."""
    arrival_padding: bool = True
    """False reproduces the fault, for comparison: the first row of a request then has 1 token."""

    @classmethod
    def from_config(cls, vllm_config: Any) -> "SchedulerSettings":
        """Raises ConfigError for an unknown key or a value that is no boolean."""
        given = (vllm_config.additional_config or {}).get(SETTINGS_KEY, {})
        for name, value in given.items():
            if name not in cls.__slots__ or not isinstance(value, bool):
                raise ConfigError(f"--additional-config: {SETTINGS_KEY}.{name} = {value!r} is not known")
        return cls(**given)


def check_engine(scheduler: Any, *, asynchronous: bool, served_context_limit: int) -> None:
    """Refuse an engine in which a row could not be kept 1 + K wide; ConfigError names the flag.

    The decode node refuses more, and earlier (decode_node/limits.py). This also holds under a plain vLLM
    server, and is all that the scheduler itself rests on.
    """
    config = scheduler.scheduler_config
    if config.async_scheduling != asynchronous:
        name = "LockstepScheduler" if config.async_scheduling else "LockstepSyncScheduler"
        raise ConfigError(f"--scheduler-cls: give decode_node.scheduler.{name} for this --async-scheduling")
    if scheduler.use_pp:
        raise ConfigError("--pipeline-parallel-size: decode runs without; give 1")
    if scheduler.dynamic_sd_lookup is not None:
        raise ConfigError("--speculative-config: remove num_speculative_tokens_per_batch_size")
    if scheduler.num_prefill_lookahead > 1:
        raise ConfigError("--speculative-config: a draft model of several MTP modules is not supported")
    if scheduler.need_mamba_block_aligned_split:
        raise ConfigError("--mamba-cache-mode: align is not supported")
    _check_budgets(scheduler)
    _check_kv_pool(scheduler, served_context_limit)


def _check_budgets(scheduler: Any) -> None:
    """Every batch of full rows fits, so no row is ever cut to what is left of a budget."""
    width, rows = 1 + scheduler.num_spec_tokens, scheduler.max_num_running_reqs
    speculative = scheduler.vllm_config.speculative_config
    draft_slots = speculative.max_num_new_slots_for_drafting if speculative is not None else 0
    needed = rows * (width + draft_slots)
    if scheduler.scheduler_config.max_num_batched_tokens < needed:
        raise ConfigError(f"--max-num-batched-tokens: must be at least {needed} for {rows} --max-num-seqs")
    if scheduler.max_num_scheduled_tokens < rows * width:
        raise ConfigError(f"--max-num-scheduled-tokens: must be at least {rows * width}")


def _check_kv_pool(scheduler: Any, served_context_limit: int) -> None:
    """A request of any served length can be admitted when the pool is empty; else it would wait for ever.

    A remote load needs the blocks of its tokens and those of one speculative step (scheduler.py:1247).
    """
    step_blocks = scheduler._spec_decode_step_blocks
    needed = cdiv(served_context_limit, scheduler.block_size) + step_blocks
    usable = scheduler.cache_config.num_gpu_blocks - 1  # vLLM keeps one null block
    if usable < needed:
        fits = (usable - step_blocks) * scheduler.block_size
        raise ConfigError(
            f"--max-model-len: the KV cache holds {usable} blocks and one request of {served_context_limit} "
            f"tokens needs {needed}; give at most {max(fits, 0)}, or more memory for the KV cache"
        )
