"""One decode rank: vLLM's engine loop (vllm/v1/engine/core.py) over the real scheduler and a fake worker."""

import contextlib
from collections import deque
from dataclasses import dataclass
from typing import Any

from simulator.model import Conversation
from simulator.receiver import Push, Receiver
from simulator.shape import BLOCK_SIZE, Shape
from simulator.worker import DisagreementError, Row, Worker
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from decode_node.scheduler.rows import Violation, violation_of


@dataclass(slots=True)
class Batch:
    """A scheduled step whose result has not been taken."""

    output: Any
    rows: list[Row]
    report: KVConnectorOutput


class Engine:
    """Steps as `EngineCore.step` or, with two batches in flight, `step_with_batch_queue`."""

    def __init__(self, shape: Shape, rank: int) -> None:
        self.shape = shape
        self.scheduler = shape.make_scheduler(rank)
        memory = [[0] * BLOCK_SIZE for _ in range(shape.num_blocks)]
        self.worker = Worker(shape, memory)
        self.receiver = Receiver(shape, memory)
        self._attempts: dict[str, tuple[Conversation, int, Push]] = {}
        self._conversations: dict[str, Conversation] = {}
        self._queue: deque[Batch] = deque()
        self._late_aborts: list[str] = []
        self.rows: dict[str, int] = {}
        """Tokens of each row of the step that was scheduled last; empty if none was."""
        self.num_steps = 0
        """In which it scheduled or took a result; the dummy steps of an idle rank are not counted."""
        self.violations: list[Violation] = []
        """Why rows of any step were not 1 + K wide."""

    def add(self, request: Request, conversation: Conversation, push: Push) -> None:
        self._conversations[request.request_id] = conversation
        self.scheduler.add_request(request)
        # Prefill computes the prompt and the carried tokens.
        self._attempts[request.request_id] = (conversation, request.num_tokens, push)

    def abort(self, request_id: str, *, late: bool) -> None:
        """Between two steps, or `late`: while one runs (core.py `_process_aborts_queue`)."""
        if late:
            self._late_aborts.append(request_id)
        else:
            self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def reset_prefix_cache(self) -> None:
        """As an administrator may: all running requests are preempted, and their results dropped."""
        with contextlib.suppress(RuntimeError):  # raised after that, when blocks are still in use
            self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def has_work(self) -> bool:
        return bool(self.scheduler.has_requests() or self._queue)

    def step(self, now: int) -> dict[int, Any]:
        """One pass of the engine's loop. Returns the outputs by client."""
        self.rows = {}
        if not self.has_work():
            return {}
        self.num_steps += 1
        return self._step_with_queue(now) if self.shape.asynchronous else self._step(now)

    def _step(self, now: int) -> dict[int, Any]:
        if not self.scheduler.has_requests():
            return {}
        batch = self._schedule(now)
        outputs = self._update(batch)
        if batch.rows and self.shape.num_speculative_tokens:
            self.scheduler.update_draft_token_ids(DraftTokenIds(*self.worker.take_draft_token_ids()))
        return outputs

    def _step_with_queue(self, now: int) -> dict[int, Any]:
        deferred = None
        if self.scheduler.has_requests():
            batch = self._schedule(now)
            if batch.rows and batch.output.pending_structured_output_tokens:
                deferred = batch
            else:
                self._queue.appendleft(batch)
                if len(self._queue) < 2 and (batch.rows or self.scheduler.has_requests()):
                    return {}
        outputs = self._update(self._queue.pop())
        if deferred:
            if self.shape.num_speculative_tokens:
                # The rows of the step before, whose result was just taken.
                drafts = DraftTokenIds(*self._previous_drafts(deferred))
                self.scheduler.update_draft_token_ids_in_output(drafts, deferred.output)
            self._queue.appendleft(deferred)
        return outputs

    def _previous_drafts(self, batch: Batch) -> tuple[list[str], list[list[int]]]:
        rows = [row.previous for row in batch.rows if row.previous is not None]
        return [row.request_id for row in rows], [list(row.next_drafts) for row in rows]

    def _schedule(self, now: int) -> Batch:
        output = self.scheduler.schedule()
        self.rows = dict(output.num_scheduled_tokens)
        if sum(self.rows.values()) != output.total_num_scheduled_tokens:
            raise DisagreementError("total_num_scheduled_tokens is not the sum of its rows")
        self._judge(output)
        rows = self.worker.prepare(output, self._conversations)
        for row in rows:
            (block_ids,) = self.scheduler.kv_cache_manager.get_block_ids(row.request_id)
            if row.block_ids != block_ids:
                raise DisagreementError(f"{row.request_id}: the worker's blocks are not the scheduler's")
        if output.kv_connector_metadata is not None:
            self.receiver.step(output.kv_connector_metadata, self._attempts, now)
        return Batch(output, rows, self.receiver.take_report())

    def _judge(self, output: Any) -> None:
        arrived = {new.req_id for new in output.scheduled_new_reqs}
        for request_id, num_tokens in self.rows.items():
            violation = violation_of(
                self.scheduler.requests[request_id],
                num_tokens,
                width=self.shape.width,
                max_model_len=self.shape.max_model_len,
                arrived=request_id in arrived,
            )
            if violation is not None:
                self.violations.append(violation)

    def _update(self, batch: Batch) -> dict[int, Any]:
        sampled = self.worker.run(batch.rows)
        request_ids = [row.request_id for row in batch.rows]
        if self._late_aborts:
            aborts, self._late_aborts = self._late_aborts, []
            self.scheduler.finish_requests(aborts, RequestStatus.FINISHED_ABORTED)
        result = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled,
            kv_connector_output=batch.report,
        )
        return self.scheduler.update_from_output(batch.output, result)
