"""Contracts with vLLM 0.32.0 that decode_node/scheduler rests on (docs/vllm-surface.md)."""

import inspect
from dataclasses import fields
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request

from decode_node.scheduler import LockstepScheduler, LockstepSyncScheduler
from decode_node.scheduler.hand_off import HandOffRules
from decode_node.scheduler.rules import LockstepRules
from lockstep.node.parking.scheduler import ParkingScheduler


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_schedule_asks_the_gate_last() -> None:
    """For a running and a waiting row: after every cut, before its blocks; 0 leaves it out."""
    source = inspect.getsource(Scheduler.schedule)
    running, waiting = source.split("# Next, schedule the WAITING requests.")
    for loop in (running, waiting):
        gate = loop.index("num_new_tokens = self._reserve_prefill_lookahead(")
        cuts = ("token_budget, input_budget", "_mamba_block_aligned_split(", "_try_schedule_encoder_inputs(")
        assert max(loop.index(cut) for cut in cuts if cut in loop) < gate
        assert gate < loop.index("if num_new_tokens == 0:", gate) < loop.index("allocate_slots(", gate)
        assert "allocate_slots(" not in loop[:gate]
        assert loop.count("self._reserve_prefill_lookahead(") == 1
    assert parameters(Scheduler._reserve_prefill_lookahead) == [
        "self",
        "request",
        "num_computed_tokens",
        "num_new_tokens",
    ]


def test_drafts_are_read_after_the_output_is_made() -> None:
    """`_update_after_schedule` comes last, so rows that it fills go out and count as filled."""
    source = inspect.getsource(Scheduler.schedule)
    assert source.rstrip().endswith(
        "self._update_after_schedule(scheduler_output)\n        return scheduler_output"
    )
    assert "len(spec_decode_tokens.get(req_id, ()))" in inspect.getsource(
        AsyncScheduler._update_after_schedule
    )


def test_worker_is_sent_all_tokens_of_rows_that_it_did_not_run_last() -> None:
    source = inspect.getsource(Scheduler._make_cached_request_data)
    assert "if req_id not in self.prev_step_scheduled_req_ids:" in source
    assert "all_token_ids" in {field.name for field in fields(CachedRequestData)}


def test_invalid_drafts_are_left_out_of_the_count() -> None:
    """Of the step's statistics and of the request's own."""
    assert "num_invalid_spec_tokens" in {field.name for field in fields(SchedulerOutput)}
    source = inspect.getsource(Scheduler.update_from_output)
    assert source.count("scheduler_output.num_invalid_spec_tokens") >= 3
    assert parameters(Scheduler.make_spec_decoding_stats) == parameters(
        LockstepRules.make_spec_decoding_stats
    )


def test_waiting_request_is_skipped_when_the_hook_says_no() -> None:
    source = inspect.getsource(Scheduler.schedule)
    assert "ready_to_schedule = self._handle_blocked_waiting_request(request)" in source
    assert "if not ready_to_schedule:\n                    skip_request(request_queue)" in source


def test_preemption_frees_and_keeps_what_is_in_flight() -> None:
    assert parameters(Scheduler._preempt_request) == ["self", "request", "timestamp", "drop_stale_output"]
    source = inspect.getsource(Scheduler._preempt_request)
    assert "request.num_stale_output_tokens = request.num_in_flight_tokens" in source
    assert "request.status = RequestStatus.PREEMPTED" in source


def test_requests_with_blocks_wait_in_a_queue_of_their_own() -> None:
    """They are scheduled before all others, and none is tried behind one that finds no blocks."""
    source = inspect.getsource(Scheduler.schedule)
    assert "request_queue = self.kv_holding_waiting\n                if not request_queue and" in source
    assert "if new_blocks is None:\n                    # The request cannot be scheduled." in source
    source = inspect.getsource(Scheduler.__init__)
    for name in ("kv_holding_waiting", "_pause_state", "policy", "finished_recving_kv_req_ids"):
        assert f"self.{name}" in source, name


def test_failed_loads_are_reported_by_two_methods() -> None:
    """Each returns the requests that vLLM ends with an error in the same call."""
    source = inspect.getsource(Scheduler.update_from_output)
    assert "self._handle_failed_recving(" in source
    assert "self._handle_invalid_blocks(" in source
    assert "if failed_kv_load_req_ids and not self.recompute_kv_load_failures:" in source


def test_finished_ids_are_kept_by_client() -> None:
    source = inspect.getsource(Scheduler._free_request)
    assert "self.finished_req_ids_dict[request.client_index].add(request_id)" in source
    assert "finished_requests" in EngineCoreOutputs.__struct_fields__
    for name in ("stop_reason", "events", "trace_headers", "spec_decode_metrics"):
        assert name in EngineCoreOutput.__struct_fields__


def test_attributes_that_are_read() -> None:
    """Set by the constructors of the scheduler and of a request."""
    source = inspect.getsource(Scheduler.__init__)
    for name in (
        "num_spec_tokens",
        "max_model_len",
        "max_num_running_reqs",
        "max_num_scheduled_tokens",
        "recompute_kv_load_failures",
        "dynamic_sd_lookup",
        "num_prefill_lookahead",
        "need_mamba_block_aligned_split",
        "use_pp",
        "_spec_decode_step_blocks",
        "finished_req_ids_dict",
    ):
        assert f"self.{name}" in source, name
    source = inspect.getsource(Request.__init__)
    for name in (
        "num_output_placeholders",
        "num_in_flight_tokens",
        "num_computed_tokens",
        "max_tokens",
        "skip_reading_prefix_cache",
        "resumable",
        "mm_features",
        "kv_transfer_params",
        "client_index",
    ):
        assert f"self.{name}" in source, name


def test_both_classes_are_vllms_own_with_our_rules_in_front() -> None:
    assert issubclass(LockstepScheduler, AsyncScheduler)
    assert not issubclass(LockstepSyncScheduler, AsyncScheduler)
    for scheduler_cls in (LockstepScheduler, LockstepSyncScheduler):
        assert scheduler_cls.__mro__[1:4] == (ParkingScheduler, HandOffRules, LockstepRules)
