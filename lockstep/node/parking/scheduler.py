"""The scheduler's part of parking: which requests keep the engine stepping, and a hook before a step."""

from collections.abc import Callable
from typing import Any


class ParkingScheduler:
    """Put before vLLM's `Scheduler` or `AsyncScheduler`. Adds nothing unless `Parking` uses it."""

    lockstep_parked: bool = False
    """No unfinished request here needs a step now. They still count as work, so that the engine looks on."""
    lockstep_on_work: Callable[[], None] | None = None
    """Called with each step that has rows, before it runs."""

    def has_unfinished_requests(self) -> bool:
        """vLLM's group of ranks asks this to go on with its wave (v1/engine/core.py:2353)."""
        return not self.lockstep_parked and bool(super().has_unfinished_requests())  # type: ignore[misc]

    def has_requests(self) -> bool:
        """vLLM's engine asks this to go on looking (v1/engine/core.py:1537)."""
        unfinished = super().has_requests()  # type: ignore[misc]
        return bool(unfinished) or bool(super().has_unfinished_requests())  # type: ignore[misc]

    def schedule(self, throttle_prefills: bool = False) -> Any:
        scheduler_output = super().schedule(throttle_prefills)  # type: ignore[misc]
        if scheduler_output.total_num_scheduled_tokens > 0 and self.lockstep_on_work is not None:
            self.lockstep_on_work()
        return scheduler_output
