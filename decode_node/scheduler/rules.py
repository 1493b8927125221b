"""The rules that keep every row at 1 + K tokens, as overrides of vLLM's scheduler.

One gate decides on each row right before its blocks are allocated: one known token and room for K drafts
makes a full row, anything else is refused and noted as a bounce. What the gate cannot repair is kept from
it: requests that cannot get their KV from prefill, prompts beyond the served limit, preempted requests.
"""

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import RequestStatus

from decode_node.limits import served_context_limit
from decode_node.scheduler.bounces import Bounces, bounced_output
from decode_node.scheduler.counters import SchedulerCounters
from decode_node.scheduler.rows import (
    Violation,
    count_placeholders,
    fill_drafts,
    unpad_arrivals,
    violation_of,
)
from decode_node.scheduler.settings import SchedulerSettings, check_engine
from lockstep.bounce import Bounce

logger = init_logger(f"vllm.{__name__}")


class LockstepRules(Scheduler):
    """To be put before vLLM's `AsyncScheduler` or `Scheduler`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = SchedulerSettings.from_config(self.vllm_config)
        self._asynchronous = isinstance(self, AsyncScheduler)
        self._width: int = 1 + self.num_spec_tokens
        self._context_limit = served_context_limit(self.vllm_config)
        check_engine(self, asynchronous=self._asynchronous, served_context_limit=self._context_limit)
        # Whatever kv_load_failure_policy says: a decode rank never computes a prompt.
        self.recompute_kv_load_failures = False
        self._bounces = Bounces()
        self._counters = SchedulerCounters()
        self._revoked: frozenset[str] = frozenset()  # receives of the step's report that were given up unused

    def lockstep_counters(self) -> dict[str, Any]:
        """See `SchedulerCounters.snapshot`."""
        return self._counters.snapshot()

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        request.max_tokens = min(request.max_tokens, self._context_limit - request.num_prompt_tokens)
        if request.num_tokens >= self._context_limit:
            self._bounces.note(request, Bounce.CONTEXT_LIMIT)
        elif not self._is_decode_work(request):
            self._bounces.note(request, Bounce.LOCAL_PREFILL)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        self._put_offered_first()
        scheduler_output = super().schedule(throttle_prefills)
        if not (scheduler_output.total_num_scheduled_tokens or self.running or self._bounces):
            self._end_standstill()
        self._check(scheduler_output)
        return scheduler_output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        received = model_runner_output.kv_connector_output
        told = received.kv_connector_worker_meta if received is not None else None
        self._revoked = getattr(told, "revoked", frozenset())
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request, reason in self._bounces.take_due():
            self._end(request, reason, outputs)
        return outputs

    def has_requests(self) -> bool:
        # Also while vLLM is paused, when waiting requests do not count: a bounce must get out.
        return bool(self._bounces) or bool(super().has_requests())

    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: Any) -> None:
        placeholders = scheduler_output.num_invalid_spec_tokens or {}
        super().update_draft_token_ids_in_output(draft_token_ids, scheduler_output)
        scheduler_output.num_invalid_spec_tokens = placeholders | scheduler_output.num_invalid_spec_tokens

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> Any:
        if (num_invalid_spec_tokens or {}).get(request_id, 0) >= num_draft_tokens:
            return spec_decoding_stats  # nothing was proposed, so nothing was verified
        return super().make_spec_decoding_stats(
            spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
        )

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        return request not in self._bounces and bool(super()._handle_blocked_waiting_request(request))

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """The gate: vLLM asks this last of all, for running and waiting requests, before it allocates.

        0 leaves the request out of this step (scheduler.py:755 and :1217).
        """
        num_known_tokens = request.num_tokens + request.num_output_placeholders - num_computed_tokens
        if num_known_tokens <= 0 or request in self._bounces:
            return 0
        if num_known_tokens > 1:
            self._bounces.note(request, Bounce.LOCAL_PREFILL)
            return 0
        if num_computed_tokens + self._width + 1 > self.max_model_len:
            self._bounces.note(request, Bounce.CONTEXT_LIMIT)
            return 0
        if request.status != RequestStatus.RUNNING and not self._settings.arrival_padding:
            return num_new_tokens
        return self._width

    def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
        super()._preempt_request(request, timestamp, drop_stale_output)
        self._bounces.note(request, Bounce.PREEMPTED)

    def _handle_failed_recving(self, failed_req_ids: set[str]) -> set[str]:
        return self._bounce_failed_loads(super()._handle_failed_recving(failed_req_ids))

    def _handle_invalid_blocks(
        self, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]
    ) -> set[str]:
        return self._bounce_failed_loads(
            super()._handle_invalid_blocks(invalid_block_ids, num_scheduled_tokens)
        )

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        if not self._settings.arrival_padding:
            unpad_arrivals(scheduler_output)
        fill_drafts(scheduler_output, self.num_spec_tokens)
        placeholders = count_placeholders(scheduler_output, drafts_on_worker=self._asynchronous)
        # vLLM leaves these out where it counts acceptance (scheduler.py:2136 and :2968).
        scheduler_output.num_invalid_spec_tokens = placeholders or None
        arrivals = [new_request.req_id for new_request in scheduler_output.scheduled_new_reqs]
        self._counters.padded_arrivals += sum(request_id in placeholders for request_id in arrivals)
        self._counters.placeholder_drafts += sum(placeholders.values())
        self._counters.reentries += len(scheduler_output.scheduled_cached_reqs.all_token_ids)
        super()._update_after_schedule(scheduler_output)

    def _is_decode_work(self, request: Any) -> bool:
        """Whether all tokens but the last can come from prefill, so that one row of 1 + K starts it."""
        if request.pooling_params is not None or request.resumable or request.mm_features:
            return False
        params = request.kv_transfer_params or {}
        loads = (
            self.connector is not None
            and bool(params.get("do_remote_prefill"))
            and not request.skip_reading_prefix_cache
        )
        return loads or request.num_tokens == 1

    def _put_offered_first(self) -> None:
        """Where this rank stood still: requests that prefill has finished get blocks before all others."""
        take = getattr(self.connector, "take_offered", None)
        for request_id in take() if take is not None else ():
            request = self.requests.get(request_id)
            if request is not None and request in self.waiting:
                self.waiting.remove_request(request)
                self.waiting.prepend_request(request)

    def _end_standstill(self) -> None:
        """Nothing runs: the first whose KV is here has no block for its row, and those behind it hold theirs.

        vLLM preempts only what runs (scheduler.py `_preempt_request`). As it would then, the last one goes.
        """
        arrived = [
            request
            for request in self.kv_holding_waiting
            if request.status == RequestStatus.WAITING
            or request.request_id in self.finished_recving_kv_req_ids
        ]
        stuck = any(request.status == RequestStatus.WAITING for request in arrived)
        if stuck and len(arrived) > 1 and self._pause_state is PauseState.UNPAUSED:
            by_priority = self.policy is SchedulingPolicy.PRIORITY
            last = max(arrived, key=lambda one: (by_priority and one.priority, one.arrival_time))
            self._bounces.note(last, Bounce.PREEMPTED)

    def _bounce_failed_loads(self, request_ids: set[str]) -> set[str]:
        """Returns those that vLLM has to end itself: a load within a step has spoiled that step's row."""
        waiting = {
            request_id
            for request_id in request_ids
            if self.requests[request_id].status == RequestStatus.WAITING_FOR_REMOTE_KVS
        }
        for request_id in waiting:
            reason = Bounce.REVOKED if request_id in self._revoked else Bounce.KV_LOAD_FAILED
            self._bounces.note(self.requests[request_id], reason)
        return request_ids - waiting

    def _end(self, request: Any, reason: Bounce, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Finish `request`, which goes back."""
        self.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        self._put_last(bounced_output(request, reason), request, outputs)
        self._counters.bounced[reason] += 1

    def _put_last(self, output: Any, request: Any, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Add the last output of a request that has just been finished to this step's."""
        of_client = outputs.setdefault(request.client_index, EngineCoreOutputs())
        of_client.outputs.append(output)
        if self.finished_req_ids_dict is not None:
            finished = self.finished_req_ids_dict.pop(request.client_index, set())
            of_client.finished_requests = (of_client.finished_requests or set()) | finished

    def _check(self, scheduler_output: Any) -> None:
        """Look for rows that are not 1 + K wide; each cause counts once a step."""
        arrivals = {new_request.req_id for new_request in scheduler_output.scheduled_new_reqs}
        found: dict[Violation, str] = {}
        for request_id, num_scheduled_tokens in scheduler_output.num_scheduled_tokens.items():
            violation = violation_of(
                self.requests[request_id],
                num_scheduled_tokens,
                width=self._width,
                max_model_len=self.max_model_len,
                arrived=request_id in arrivals,
            )
            if violation is not None:
                found.setdefault(violation, request_id)
        for violation, request_id in found.items():
            self._report(violation, request_id)

    def _report(self, violation: Violation, request_id: str) -> None:
        """Count it and log its first case; strict: raise RuntimeError, which ends the engine."""
        message = f"Request {request_id} has a row that is not {self._width} tokens wide: {violation}"
        if violation not in self._counters.violations:
            logger.warning(message)
        self._counters.violations[violation] += 1
        if self._settings.strict:
            raise RuntimeError(message)
