"""The decode rank's scheduler: every row that it schedules has exactly 1 + K tokens, or goes back to prefill.

Give one of the two classes to `--scheduler-cls`: `LockstepScheduler` with asynchronous scheduling,
`LockstepSyncScheduler` with `--no-async-scheduling`. They need no connector of ours.
"""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from decode_node.scheduler.hand_off import HandOffRules
from kv_transfer.carried.scheduler import CarriedOutputScheduler
from lockstep.node.parking.scheduler import ParkingScheduler


class LockstepScheduler(ParkingScheduler, HandOffRules, CarriedOutputScheduler, AsyncScheduler):
    """Our rules over vLLM's asynchronous scheduler."""


class LockstepSyncScheduler(ParkingScheduler, HandOffRules, CarriedOutputScheduler, Scheduler):
    """Our rules over vLLM's synchronous scheduler."""


__all__ = ["LockstepScheduler", "LockstepSyncScheduler"]
