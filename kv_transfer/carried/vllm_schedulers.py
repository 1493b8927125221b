"""vLLM's own schedulers, taking carried tokens: for prefill, and for `--scheduler stock` on decode."""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from kv_transfer.carried.scheduler import CarriedOutputScheduler
from lockstep.node.parking.scheduler import ParkingScheduler

SCHEDULER = "kv_transfer.carried.vllm_schedulers.make_scheduler"
"""For `--scheduler-cls`, which vLLM only calls (v1/engine/core.py:172)."""


class CarriedAsyncScheduler(ParkingScheduler, CarriedOutputScheduler, AsyncScheduler):
    """With asynchronous scheduling, which is vLLM's default."""


class CarriedSyncScheduler(ParkingScheduler, CarriedOutputScheduler, Scheduler):
    """Without."""


def make_scheduler(vllm_config: Any, **kwargs: Any) -> Scheduler:
    """The one that fits what vLLM resolved: it turns asynchronous scheduling off by itself in some cases."""
    asynchronous = vllm_config.scheduler_config.async_scheduling
    chosen = CarriedAsyncScheduler if asynchronous else CarriedSyncScheduler
    return chosen(vllm_config=vllm_config, **kwargs)
