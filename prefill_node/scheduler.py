"""The scheduler of a prefill engine: vLLM's own, taking the tokens of earlier attempts."""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from kv_transfer.carried.scheduler import CarriedOutputScheduler

SCHEDULER = "prefill_node.scheduler.make_scheduler"
"""For `--scheduler-cls`, which vLLM only calls (v1/engine/core.py:172)."""


class PrefillScheduler(CarriedOutputScheduler, AsyncScheduler):
    """With asynchronous scheduling, which is vLLM's default."""


class SyncPrefillScheduler(CarriedOutputScheduler, Scheduler):
    """Without."""


def make_scheduler(vllm_config: Any, **kwargs: Any) -> Scheduler:
    """The one that fits what vLLM resolved: it turns asynchronous scheduling off by itself in some cases."""
    chosen = PrefillScheduler if vllm_config.scheduler_config.async_scheduling else SyncPrefillScheduler
    return chosen(vllm_config=vllm_config, **kwargs)
