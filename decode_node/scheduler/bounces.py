"""The requests that go back to prefill: noted when it turns out, ended once nothing of them is in flight."""

from collections.abc import Iterator
from typing import Any

from vllm.v1.engine import EngineCoreOutput, FinishReason

from lockstep.bounce import Bounce


class Bounces:
    """What was noted and has not ended yet; at most one entry for a live request."""

    def __init__(self) -> None:
        self._pending: dict[str, tuple[Any, Bounce]] = {}

    def __bool__(self) -> bool:
        return bool(self._pending)

    def __contains__(self, request: Any) -> bool:
        noted = self._pending.get(request.request_id)
        return noted is not None and noted[0] is request

    def note(self, request: Any, reason: Bounce) -> None:
        """`request` must not be scheduled again; the first reason stays."""
        if request not in self:
            self._pending[request.request_id] = (request, reason)

    def take_due(self) -> Iterator[tuple[Any, Bounce]]:
        """Yield and forget what can end now. A request that has finished meanwhile is forgotten.

        Steps that were in flight at the preemption still deliver their tokens (vLLM calls them stale,
        scheduler.py `_preempt_request`), and may even end the request; so all of them are awaited.
        """
        for request_id, (request, reason) in list(self._pending.items()):
            if request.is_finished():
                del self._pending[request_id]
            elif request.num_in_flight_tokens == 0:
                del self._pending[request_id]
                yield request, reason


def bounced_output(request: Any, reason: Bounce) -> EngineCoreOutput:
    """The last output of `request`, which has ended: no tokens, and why it goes back."""
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=FinishReason.ABORT,
        stop_reason=str(reason),
        events=request.take_events(),
        trace_headers=request.trace_headers,
        spec_decode_metrics=request.spec_decode_metrics,
    )
