"""One decode rank with vLLM's own engine loop (`DPEngineCoreProc.run_busy_loop`) in a thread, parking on.

Scheduler and loop are the real ones, the coordinator too; the worker is the simulator's. The clock is real:
one of the simulator's steps takes `TICK_S`.
"""

import queue
import threading
import time
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import msgspec
import zmq
from simulator.model import Conversation
from simulator.receiver import Push, Receiver
from simulator.shape import BLOCK_SIZE, Shape
from simulator.worker import Row, Worker
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType
from vllm.v1.engine.core import DPEngineCoreProc, EngineShutdownState
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackEncoder

from kv_transfer.params import carried_output_token_ids

TICK_S = 0.02
ROUND_TIMEOUT_S = 5.0


class Rounds:
    """The forward passes that the ranks make together: nobody leaves one before all are in it."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=ROUND_TIMEOUT_S)
        self._idle = [False] * num_ranks
        self.log: list[tuple[float, bool]] = []
        """When each round ended, and whether no rank had work in it."""

    def enter(self, rank: int, *, idle: bool) -> bool:
        """Returns whether no rank has work. Raises BrokenBarrierError where a rank is left alone."""
        self._idle[rank] = idle
        self._barrier.wait()
        all_idle = all(self._idle)
        if self._barrier.wait() == 0:
            self.log.append((time.monotonic(), all_idle))
        return all_idle


class Connector:
    """The worker side of the connector: the simulator's receiver, with a clock of its own."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._attempts: dict[str, tuple[Conversation, int, Push]] = {}
        self._lock = threading.Lock()
        self._taken = KVConnectorOutput(finished_recving=set())
        self._wake: Any = None
        self._started = time.monotonic()

    def now(self) -> int:
        return int((time.monotonic() - self._started) / TICK_S)

    def expect(self, request_id: str, attempt: tuple[Conversation, int, Push]) -> None:
        self._attempts[request_id] = attempt

    def order(self, meta: Any) -> None:
        with self._lock:
            self._receiver.step(meta, self._attempts, self.now())

    def tick(self) -> None:
        """What the writer thread does."""
        self.order(SimpleNamespace(push_registrations={}, cancels=()))
        if self._wake is not None and self.lockstep_has_news():
            self._wake()

    def lockstep_on_news(self, wake: Any) -> None:
        self._wake = wake

    def lockstep_on_first_tokens(self, begin_telling: Any) -> None:
        """Decode samples none."""

    def lockstep_has_news(self) -> bool:
        with self._lock:
            report = self._receiver._report
            return bool(report.finished_recving or report.failed_recving or report.invalid_block_ids)

    def get_transfer_results(self, finished: set[str]) -> KVConnectorOutput:
        with self._lock:
            self._taken = self._receiver.take_report()
        return self._taken

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._taken.invalid_block_ids

    def build_connector_worker_meta(self) -> Any:
        return self._taken.kv_connector_worker_meta

    @property
    def outstanding(self) -> bool:
        return self._receiver.outstanding


class Executor(UniProcExecutor):
    """vLLM's executor as the engine core calls it, over the simulator's worker."""

    is_sleeping = False

    def __init__(self, rank: int, shape: Shape, rounds: Rounds) -> None:
        memory = [[0] * BLOCK_SIZE for _ in range(shape.num_blocks)]
        self.rank, self.rounds = rank, rounds
        self.worker, self.connector = Worker(shape, memory), Connector(Receiver(shape, memory))
        self.conversations: dict[str, Conversation] = {}
        self.looks = 0
        """Steps of the engine, with and without rows."""
        self._rows: list[Row] = []

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        self.looks += 1
        self._rows = self.worker.prepare(scheduler_output, self.conversations)
        self.connector.order(scheduler_output.kv_connector_metadata)
        if self._rows:
            self.rounds.enter(self.rank, idle=False)
        return _done(None if self._rows else self._result([]))

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return _done(self._result(self.worker.run(self._rows)))

    def take_draft_token_ids(self) -> DraftTokenIds:
        """Of the rows of the step before, which the next one's grammar needs."""
        rows = [row.previous for row in self._rows if row.previous is not None]
        return DraftTokenIds([row.request_id for row in rows], [list(row.next_drafts) for row in rows])

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if method == "execute_dummy_batch":
            return [self.rounds.enter(self.rank, idle=True)]
        return [self.connector]  # `Parking` asks for it

    def _result(self, sampled: list[list[int]]) -> ModelRunnerOutput:
        ids = [row.request_id for row in self._rows]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=self.connector.get_transfer_results(set()),
        )


class Rank:
    """An engine core without processes around it: what its two socket threads do is done here."""

    def __init__(self, rank: int, shape: Shape, rounds: Rounds, group: Any, sockets: tuple[str, str]) -> None:
        self.executor = Executor(rank, shape, rounds)
        self.core = core = object.__new__(DPEngineCoreProc)
        core.__dict__.update(
            vllm_config=shape.vllm_config(rank),
            scheduler=shape.make_scheduler(rank),
            model_executor=self.executor,
            batch_queue=deque(maxlen=2),
            batch_queue_size=2,
            step_fn=core.step_with_batch_queue,
            input_queue=queue.Queue(),
            output_queue=queue.Queue(),
            aborts_queue=queue.Queue(),
            shutdown_state=EngineShutdownState.RUNNING,
            dp_group=group,
            dp_rank=rank,
            engine_index=rank,
            dp_sync_interval=16,
            _weight_version="default",
            _idle_state_callbacks=[],
            eep_scaling_state=None,
        )
        for name in ("engines_running", "pending_pause", "ignore_start_dp_wave", "publish_dp_lb_stats"):
            setattr(core, name, False)
        for name in ("log_stats", "is_mm_encoder_only", "is_pooling_model", "enable_fault_tolerance"):
            setattr(core, name, False)
        for name in ("current_wave", "step_counter", "prefill_schedule_interval"):
            setattr(core, name, 0)
        for name in ("has_coordinator", "process_input_queue_block", "async_scheduling"):
            setattr(core, name, True)
        # Bit masks go to a sampler, and there is none.
        core.scheduler.get_grammar_bitmask = lambda scheduler_output: None
        core.check_for_draft_tokens = shape.num_speculative_tokens > 0
        self.outputs: queue.Queue[EngineCoreOutputs] = queue.Queue()
        self.error: Exception | None = None
        self._stopping = threading.Event()
        loops = (self._run, lambda: self._send(sockets[0]), lambda: self._receive(sockets[1]), self._tick)
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in loops]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the loop as a signal does; raises what ended it before."""
        self.core.shutdown_state = EngineShutdownState.REQUESTED
        self.core.input_queue.put((EngineCoreRequestType.WAKEUP, None))
        self._threads[0].join(timeout_s)
        self._stopping.set()
        for thread in self._threads:
            thread.join(timeout_s)
            assert not thread.is_alive()
        if self.error is not None:
            raise self.error

    def add(self, request: Request, conversation: Conversation, push: Push) -> None:
        self.executor.conversations[request.request_id] = conversation
        carried = carried_output_token_ids(request.kv_transfer_params)  # the scheduler appends them
        attempt = conversation, request.num_tokens + len(carried), push
        self.executor.connector.expect(request.request_id, attempt)
        self.core.input_queue.put((EngineCoreRequestType.ADD, (request, 0)))

    def abort(self, request_id: str) -> None:
        self.core.aborts_queue.put([request_id])
        self.core.input_queue.put((EngineCoreRequestType.ABORT, [request_id]))

    def _run(self) -> None:
        try:
            self.core.run_busy_loop()
        except SystemExit:
            pass
        except Exception as error:  # noqa: BLE001 - of the loop under test; `stop` raises it
            self.error = error

    def _tick(self) -> None:
        while not self._stopping.wait(TICK_S / 4):
            self.executor.connector.tick()

    def _send(self, address: str) -> None:
        """`EngineCoreProc.process_output_sockets`."""
        encoder = MsgpackEncoder()
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.linger = 0
            socket.connect(address)
            while not self._stopping.is_set():
                try:
                    client_index, outputs = self.core.output_queue.get(timeout=0.05)
                except queue.Empty:
                    continue
                if client_index == -1:
                    outputs.engine_index = self.core.engine_index
                    socket.send_multipart(encoder.encode(outputs))
                else:
                    self.outputs.put(outputs)

    def _receive(self, address: str) -> None:
        """`EngineCoreProc.process_input_sockets`, of the coordinator only."""
        with zmq.Context() as context, context.socket(zmq.XSUB) as socket:
            socket.linger = 0
            socket.connect(address)
            socket.send(b"\x01")
            while not self._stopping.is_set():
                if not socket.poll(50):
                    continue
                kind, *data = socket.recv_multipart()
                if kind == EngineCoreRequestType.START_DP_WAVE.value:
                    told = msgspec.msgpack.decode(data[0])
                    self.core.input_queue.put((EngineCoreRequestType.START_DP_WAVE, told))


def _done(result: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(result)
    return future
