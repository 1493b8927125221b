"""Decode's part of the hand-off: a request goes on from prefill's first token, and verifies its drafts.

The token becomes output before the request is first scheduled, so that its last prompt token is not computed
again: one known token is left, and the gate makes a full row of it.
"""

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutput

from decode_node.scheduler.rules import LockstepRules
from kv_transfer.handoff import codec
from kv_transfer.params import (
    HAND_OFF_KEY,
    OUTPUT_TOKEN_IDS_KEY,
    carried_output_token_ids,
    hand_off_promised,
)
from lockstep.bounce import Bounce

logger = init_logger(f"vllm.{__name__}")


class HandOffRules(LockstepRules):
    """To be put before vLLM's `AsyncScheduler` or `Scheduler`. Without a promise it adds nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._drafts: dict[str, tuple[int, ...]] = {}
        self._ended: dict[str, tuple[Any, Any]] = {}  # (request, status): over with its first token

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        ended, self._ended = self._ended, {}
        for request_id, (request, status) in ended.items():
            if not request.is_finished():
                self.finish_requests(request_id, status)
                self._put_last(_last_output(request), request, outputs)
        return outputs

    def has_requests(self) -> bool:
        # Also while vLLM is paused: an end must get out.
        return bool(self._ended) or bool(super().has_requests())

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._drafts.pop(request.request_id, None)
        return finished

    def _update_waiting_for_remote_kv(self, request: Any) -> None:
        """The KV is there. The handed-over token comes first, since vLLM takes a token back where all of them
        are computed (scheduler.py:3171)."""
        params = request.kv_transfer_params
        if hand_off_promised(params) and request.request_id not in self.failed_recving_kv_req_ids:
            payload = self.connector.take_hand_off(request.request_id)
            try:
                self._go_on(request, payload)
            except codec.HandOffError as error:
                logger.error(
                    "Request %s cannot go on from prefill's first token: %s", request.request_id, error
                )
                self._bounces.note(request, Bounce.KV_LOAD_FAILED)
            params[HAND_OFF_KEY] = False
        super()._update_waiting_for_remote_kv(request)

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        if request.request_id in self._ended:
            return 0
        if hand_off_promised(request.kv_transfer_params):
            # It has loaded nothing, so nothing was handed over; a token sampled here would be another one.
            self._bounces.note(request, Bounce.KV_LOAD_FAILED)
            return 0
        return super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """Before placeholders are counted, and before vLLM makes the grammar's bit masks from the drafts."""
        for new_request in scheduler_output.scheduled_new_reqs:
            request_id = new_request.req_id
            proposed = self._drafts.pop(request_id, None)
            if not proposed or scheduler_output.num_scheduled_tokens[request_id] != self._width:
                continue
            drafts = self.structured_output_manager.validate_tokens(self.requests[request_id], list(proposed))
            scheduler_output.scheduled_spec_decode_tokens[request_id] = drafts
            self._counters.handed_over_drafts += len(drafts)
        super()._update_after_schedule(scheduler_output)

    def _go_on(self, request: Any, payload: bytes) -> None:
        """Raises HandOffError and leaves the request as it is."""
        vocab_size = self.vllm_config.model_config.get_vocab_size()
        hand_off = codec.decode(payload, num_drafts=self.num_spec_tokens, vocab_size=vocab_size)
        params = request.kv_transfer_params
        # The V1 runner reads them from here (kv_transfer/carried/runner.py).
        params[OUTPUT_TOKEN_IDS_KEY] = [*carried_output_token_ids(params), hand_off.token_id]
        request.append_output_token_ids(hand_off.token_id)
        self._counters.hand_offs += 1
        before = request.status
        if check_stop(request, self.max_model_len):
            self._ended[request.request_id] = (request, request.status)
            request.status = before
        elif not self.structured_output_manager.accept_tokens(request, [hand_off.token_id]):
            raise codec.HandOffError(f"the grammar rejects token {hand_off.token_id}")
        elif self._settings.arrival_padding:
            self._drafts[request.request_id] = hand_off.draft_token_ids


def _last_output(request: Any) -> EngineCoreOutput:
    """The end without a token: the client has it from prefill, with the reason for the end."""
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        stop_reason=request.stop_reason,
        events=request.take_events(),
        trace_headers=request.trace_headers,
    )
