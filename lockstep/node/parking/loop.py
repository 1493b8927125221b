"""What one pass of the engine's loop does when the engine may park; see the package.

Called on the engine's own thread only. A rank of a group enters a round, a forward pass with its peers, only
while its wave runs, and it makes a wave run only by telling the coordinator, which tells all ranks. So no
rank is alone in a round, and nobody who waits needs to be in one.
"""

import queue
import time
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from lockstep.node.first_tokens import FirstTokens
from lockstep.node.kv_events.engine_tap import tap_of
from lockstep.node.parking.scheduler import ParkingScheduler

PARK_S = 0.1
"""The longest time without a look. Leases and their renewal live on whole seconds and go with a step."""
LOOK_S = 0.001
"""Between two looks of an engine that nobody wakes; vLLM's own (v1/engine/core.py `_process_engine_step`)."""

_RESTS = (RequestStatus.WAITING, RequestStatus.WAITING_FOR_REMOTE_KVS)


class Parking:
    """One engine core's. `core` is vLLM's `EngineCoreProc`.

    Besides vLLM's methods its connector has, on the worker's side, `lockstep_has_news`, whether
    `get_transfer_results` would say something new, and `lockstep_on_news`, which takes what to call, on any
    thread, after each piece of news; and `lockstep_on_first_tokens`, which takes `FirstTokens.begin`.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self._scheduler: Any = core.scheduler
        self._idle = False
        self.round_was_idle = False
        """The last round was one of dummies on every rank of the group, which every rank then knows."""
        in_process = isinstance(core.model_executor, UniProcExecutor)
        self._connector: Any = core.model_executor.collective_rpc(_connector)[0] if in_process else None
        if self._connector is not None:
            wake = (EngineCoreRequestType.WAKEUP, None)
            self._connector.lockstep_on_news(lambda: core.input_queue.put_nowait(wake))
            self._connector.lockstep_on_first_tokens(FirstTokens(core).begin)
        if self._in_group:
            self._scheduler.lockstep_on_work = self._start_wave

    def wait(self) -> None:
        """Before the loop looks at its input: block until somebody tells something, at most for `PARK_S`."""
        core = self._core
        was_idle, self._idle = self._idle, False
        if not was_idle or core.engines_running or not core.has_work() or self._has_news():
            return
        is_woken = self._connector is not None and core.process_input_queue_block
        try:
            told = core.input_queue.get(timeout=PARK_S if is_woken else LOOK_S)
        except queue.Empty:
            return
        core._handle_client_request(*told)

    def step(self) -> bool:
        """As `EngineCoreProc._process_engine_step`, without its pauses; returns whether the model ran."""
        core, scheduler = self._core, self._scheduler
        self.round_was_idle = False
        self._take_news()
        outputs, executed = core.step_fn()
        self._put(outputs)
        core.post_step(executed)
        if not executed:
            self._end_empty_steps()
        self._tell_kv_events()
        nothing_due = not executed and self._nothing_due()
        self._idle = nothing_due and self._everybody_tells()
        # Out of a wave nothing but a step with rows is reason to start one.
        scheduler.lockstep_parked = nothing_due or not (executed or core.engines_running)
        if not executed and not self._idle and not core.engines_running and scheduler.has_requests():
            time.sleep(LOOK_S)
        return bool(executed)

    def dummy_round(self) -> None:
        """As `EngineCore.execute_dummy_batch`, and learn whether the peers had work."""
        self._start_wave()
        if self._connector is None:
            self._core.model_executor.execute_dummy_batch()
            return
        told = self._core.model_executor.collective_rpc("execute_dummy_batch")
        self.round_was_idle = all(answer is True for answer in told)

    @property
    def _in_group(self) -> bool:
        return hasattr(self._core, "dp_group")

    def _has_news(self) -> bool:
        return self._connector is not None and bool(self._connector.lockstep_has_news())

    def _take_news(self) -> None:
        """Tell the scheduler before it schedules; vLLM does so after the next step, or after that one's."""
        if not self._has_news():
            return
        connector = self._connector
        results = connector.get_transfer_results(set())
        arrived = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        if arrived.failed_recving or arrived.invalid_block_ids:
            self._update(SchedulerOutput.make_empty(), ModelRunnerOutput.with_kv_conn_output_only(arrived))
        else:
            # A whole update would add statistics, and send a message to the client for nothing else.
            self._scheduler._update_from_kv_xfer_finished(arrived)

    def _end_empty_steps(self) -> None:
        """Take what steps without rows brought; with batches in flight vLLM leaves it for the next step."""
        in_flight = self._core.batch_queue
        while in_flight and in_flight[-1][1].total_num_scheduled_tokens == 0:
            future, scheduler_output, _ = in_flight.pop()
            self._update(scheduler_output, future.result())

    def _tell_kv_events(self) -> None:
        """Now that the outputs are out: node and proxy handle both one after the other."""
        tap = tap_of(self._scheduler)
        if tap is not None:
            tap.told_after_steps = True
            tap.tell()

    def _update(self, scheduler_output: Any, result: Any) -> None:
        outputs = self._scheduler.update_from_output(scheduler_output, result)
        self._core._attach_weight_version(outputs)
        self._put(outputs)

    def _put(self, outputs: dict[int, Any] | None) -> None:
        for output in (outputs or {}).items():
            self._core.output_queue.put_nowait(output)

    def _nothing_due(self) -> bool:
        """After a step without rows: another one now would have none either."""
        core, scheduler = self._core, self._scheduler
        return not (
            core.batch_queue
            or scheduler.running
            or scheduler.finished_recving_kv_req_ids
            or getattr(core, "prefill_schedule_interval", 0) > 1
        )

    def _everybody_tells(self) -> bool:
        """Whether all that can change comes as news or input; a grammar that is compiled tells nobody.

        The worker has to know who has finished, and a waiting request that found no blocks waits for news.
        """
        requests = self._scheduler.requests.values()
        return not self._scheduler.finished_req_ids and all(
            request.status in _RESTS or request.is_finished() for request in requests
        )

    def _start_wave(self) -> None:
        """Have all ranks join the round that comes."""
        core = self._core
        if not core.engines_running:
            core.engines_running = True
            core.output_queue.put_nowait((-1, EngineCoreOutputs(start_wave=core.current_wave)))


def _connector(worker: Any) -> Any:
    """The worker side of the connector, or None; in the worker's process."""
    return get_kv_transfer_group() if has_kv_transfer_group() else None


def can_park(core: Any) -> bool:
    """Whether this engine core has all that parking needs; without coordinator no rank can call its peers."""
    in_group = hasattr(core, "dp_group")
    return isinstance(core.scheduler, ParkingScheduler) and (not in_group or core.has_coordinator)
