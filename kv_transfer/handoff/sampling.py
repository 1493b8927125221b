"""Prefill: whose first token each engine step samples, as the scheduler side knows it."""

from typing import Any

from kv_transfer.params import TOKEN_KEY, hand_off_promised


class FirstTokenTracker:
    """Follows requests that promise a hand-off from their first allocation until they finish."""

    def __init__(self) -> None:
        self._tracked: dict[str, Any] = {}  # vllm.v1.request.Request

    def track(self, request: Any) -> None:
        """A prefill leg was allocated blocks; again after a preemption."""
        if hand_off_promised(request.kv_transfer_params):
            self._tracked[request.request_id] = request

    def forget(self, request_id: str) -> None:
        self._tracked.pop(request_id, None)

    def step(self, scheduler_output: Any) -> dict[str, str]:
        """{request_id: the attempt's token} of those whose prompt this step completes.

        vLLM adds the step's tokens to `num_computed_tokens` only afterwards (scheduler.py
        `_update_after_schedule`).
        """
        sampling: dict[str, str] = {}
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self._tracked.get(request_id)
            if request is not None and request.num_computed_tokens + num_tokens >= request.num_tokens:
                sampling[request_id] = request.kv_transfer_params[TOKEN_KEY]
        return sampling
