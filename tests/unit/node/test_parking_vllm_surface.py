"""Contracts with vLLM 0.32.0 that parking rests on (docs/vllm-surface.md): engine loop, waves, client."""

import inspect
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.coordinator import DPCoordinatorProc
from vllm.v1.engine.core import DPEngineCoreProc, EngineCore, EngineCoreProc
from vllm.v1.engine.core_client import DPAsyncMPClient
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from lockstep.node import engine_status
from lockstep.node.parking import plugin

engine_status.register()


def source(thing: Any) -> str:
    return inspect.getsource(inspect.unwrap(thing))


def test_loops_call_what_is_replaced_by_name() -> None:
    """The two classes' loops; and every method that the plugin replaces is the class's own."""
    for loop in (EngineCoreProc.run_busy_loop, DPEngineCoreProc.run_busy_loop):
        text = source(loop.__closure__[0].cell_contents)  # behind vLLM's fault-tolerant wrapper
        assert "self._process_input_queue()" in text
        assert "self._process_engine_step()" in text
    for owner, name in (
        (EngineCoreProc, "_process_input_queue"),
        (EngineCoreProc, "_process_engine_step"),
        (EngineCore, "execute_dummy_batch"),
        (DPEngineCoreProc, "add_request"),
        (DPEngineCoreProc, "_has_global_unfinished_reqs"),
    ):
        assert hasattr(owner.__dict__[name], "__wrapped__"), name
    plugin.register()  # a second time
    assert not hasattr(EngineCoreProc._process_input_queue.__wrapped__, "__wrapped__")


def test_step_that_is_done_in_its_place() -> None:
    """`Parking.step` does the same but for the pause, which is there only for other threads."""
    text = source(EngineCoreProc._process_engine_step)
    for line in (
        "outputs, model_executed = self.step_fn()",
        "self.output_queue.put_nowait(output)",
        "self.post_step(model_executed)",
        "if not model_executed and self.scheduler.has_requests():",
        "time.sleep(0.001)",
    ):
        assert line in text, line


def test_results_in_flight_are_the_last_of_the_queue() -> None:
    """With batches in flight a step without rows leaves its result in the queue, the oldest at the right."""
    text = source(EngineCore.step_with_batch_queue)
    assert "batch_queue.appendleft((future, scheduler_output, exec_future))" in text
    assert "future, scheduler_output, exec_model_fut = batch_queue.pop()" in text
    assert "self._attach_weight_version(engine_core_outputs)" in text


def test_group_goes_on_while_a_scheduler_says_so() -> None:
    """An idle rank enters a round unless nobody runs and its scheduler has nothing unfinished."""
    text = source(DPEngineCoreProc.run_busy_loop.__closure__[0].cell_contents)
    assert "local_unfinished_reqs = self.scheduler.has_unfinished_requests()" in text
    assert "if not local_unfinished_reqs and not self.engines_running:" in text
    assert "self.execute_dummy_batch()" in text
    assert "self.scheduler.has_requests()" in source(EngineCoreProc.has_work)
    assert "self.has_unfinished_requests()" in source(Scheduler.has_requests)


def test_group_agrees_to_end_at_intervals() -> None:
    text = source(DPEngineCoreProc._has_global_unfinished_reqs)
    assert "self.step_counter % self.dp_sync_interval != 0" in text


def test_request_of_an_old_wave_starts_one() -> None:
    """Only if its wave differs from the rank's; a newer one is taken over."""
    text = source(DPEngineCoreProc.add_request)
    assert "request_wave != self.current_wave" in text
    assert "self.current_wave = request_wave" in text


def test_wave_that_a_rank_starts_reaches_its_peers() -> None:
    """The coordinator passes it on unless that wave runs or is over; a peer joins unless it is over."""
    text = source(DPCoordinatorProc.process_input_socket)
    assert "wave > current_wave" in text
    assert "wave == current_wave and not engines_running" in text
    assert "self._send_start_wave(publish_back, wave, eng_index)" in text
    joins = source(DPEngineCoreProc._handle_client_request)
    assert "exclude_eng_index != self.engine_index" in joins
    assert "new_wave >= self.current_wave" in joins
    assert "if client_index == -1:" in source(EngineCoreProc.process_output_sockets)


def test_client_calls_the_peers_unless_it_thinks_that_they_run() -> None:
    """Nothing is awaited between our assignment and its question."""
    text = source(DPAsyncMPClient.add_request_async)
    before, _ = text.split("if not self.engines_running:")
    assert " await " not in before


def test_loop_takes_a_wake_up() -> None:
    text = source(EngineCoreProc._handle_client_request)
    assert "if request_type == EngineCoreRequestType.WAKEUP:\n            return" in text
    assert isinstance(EngineCoreRequestType.WAKEUP, EngineCoreRequestType)
    init = source(EngineCoreProc.__init__)
    for name in (
        "self.input_queue = ",
        "self.output_queue = ",
        "self.has_coordinator = ",
        "self.process_input_queue_block = True",
    ):
        assert name in init, name
    waits = source(EngineCoreProc._process_input_queue)
    assert "block = self.process_input_queue_block" in waits
    assert "self._handle_client_request(*req)" in waits


def test_attributes_that_say_what_is_due() -> None:
    """What finished is told to the worker by a step; a group may put prefills off to a later one."""
    scheduler = source(Scheduler.__init__)
    for name in ("self.finished_req_ids: ", "self.requests: ", "self.running: "):
        assert name in scheduler, name
    group = source(DPEngineCoreProc)
    assert "self.dp_group, self.dp_store = " in group
    assert "self.prefill_schedule_interval > 1" in group
    assert "dp_group" not in source(EngineCoreProc.__init__)


def test_worker_in_the_engines_process() -> None:
    """The executor of one process runs an RPC at once, on the caller's thread."""
    text = source(UniProcExecutor.collective_rpc)
    assert "result = run_method(self.driver_worker, method, args, kwargs)" in text
    assert 'self.collective_rpc("execute_dummy_batch")' in source(UniProcExecutor.execute_dummy_batch)


def test_news_are_asked_for_as_the_runner_does() -> None:
    text = source(KVConnectorModelRunnerMixin._get_kv_connector_output)
    for line in (
        "kv_connector.get_transfer_results(",
        "output.finished_sending = transfer_results.finished_sending",
        "output.finished_recving = transfer_results.finished_recving",
        "output.failed_recving = transfer_results.failed_recving",
        "output.invalid_block_ids = kv_connector.get_block_ids_with_load_errors()",
        "output.kv_connector_worker_meta = kv_connector.build_connector_worker_meta()",
    ):
        assert line in text, line
    assert callable(ModelRunnerOutput.with_kv_conn_output_only)


def test_arrivals_are_told_in_one_method() -> None:
    """The rest of `update_from_output` is about failures, rows and statistics."""
    told = source(Scheduler._update_from_kv_xfer_finished)
    assert "self.connector.update_connector_output(kv_connector_output)" in told
    assert "self.finished_recving_kv_req_ids.add(req_id)" in told
    assert "kv_connector_output.finished_sending" in told
    update = source(Scheduler.update_from_output)
    assert update.count("kv_connector_output.f") == update.count("kv_connector_output.failed_recving")
