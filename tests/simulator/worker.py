"""A worker without a model: vLLM's V1 runner's bookkeeping, and a KV cache that knows what was written.

The CPU part of a step (`prepare`) runs when the step is scheduled and the accelerator's part (`run`) as late
as its result is needed, in the order of steps. So whatever the scheduler does too early meets the writes of a
step in flight. Each rule names what it follows in vllm/v1/worker/gpu_model_runner.py ("R1").
"""

from dataclasses import dataclass, field
from typing import Any

from simulator.model import WRONG, Conversation
from simulator.shape import BLOCK_SIZE, Shape

from decode_node.scheduler.rows import PLACEHOLDER
from kv_transfer.params import carried_output_token_ids

Memory = list[list[int]]


class DisagreementError(AssertionError):
    """Scheduler and worker do not have the same idea of a request, or a block is not what it should be."""


@dataclass(slots=True)
class RequestState:
    """R1's `CachedRequestState`."""

    conversation: Conversation
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    block_ids: list[int]
    num_computed_tokens: int
    prev_num_draft_len: int = 0

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids


@dataclass(slots=True)
class Row:
    """One request in one step. What is below `sampled` is known only once the step has run."""

    request_id: str
    state: RequestState
    num_tokens: int
    drafts: list[int]
    token_ids: list[int]
    block_ids: list[int]
    num_computed_tokens: int
    previous: "Row | None"
    previous_num_drafts: int
    is_sampled: bool
    sampled: list[int] = field(default_factory=list)
    next_drafts: list[int] = field(default_factory=list)


class Worker:
    """One rank's."""

    def __init__(self, shape: Shape, memory: Memory) -> None:
        self._shape = shape
        self.memory = memory
        self.states: dict[str, RequestState] = {}
        self._batch: set[str] = set()
        self._previous: dict[str, Row] = {}  # R1's prev_req_id_to_index: rows of the step before
        self._last_rows: list[Row] = []

    def prepare(self, output: Any, conversations: dict[str, Conversation]) -> list[Row]:
        """R1's `_update_states` and the host's part of `_prepare_inputs`."""
        for request_id in output.finished_req_ids:
            self.states.pop(request_id, None)
            self._leave_batch(request_id)
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        for request_id in self._batch - (output.num_scheduled_tokens.keys() - resumed):
            self._leave_batch(request_id)
        for new in output.scheduled_new_reqs:
            carried = carried_output_token_ids(new.sampling_params.extra_args["kv_transfer_params"])
            self.states[new.req_id] = RequestState(
                conversation=conversations[new.req_id],
                prompt_token_ids=list(new.prompt_token_ids),
                output_token_ids=list(carried),
                block_ids=list(new.block_ids[0]),
                num_computed_tokens=new.num_computed_tokens,
            )
        previous_num_drafts = {}
        for index, request_id in enumerate(output.scheduled_cached_reqs.req_ids):
            previous_num_drafts[request_id] = self._update_cached(output.scheduled_cached_reqs, index)
        rows = [
            self._row(output, request_id, previous_num_drafts.get(request_id, 0))
            for request_id in output.num_scheduled_tokens
        ]
        if rows:
            self._last_rows = rows
            self._previous = {row.request_id: row for row in rows if row.is_sampled}
        return rows

    def run(self, rows: list[Row]) -> list[list[int]]:
        """The accelerator's part: read and write the KV cache, verify drafts, sample, draft."""
        return [self._run_row(row) for row in rows]

    def take_draft_token_ids(self) -> tuple[list[str], list[list[int]]]:
        """Of the last step that ran (R1 `take_draft_token_ids`)."""
        rows = [row for row in self._last_rows if row.is_sampled]
        return [row.request_id for row in rows], [list(row.next_drafts) for row in rows]

    def _leave_batch(self, request_id: str) -> None:
        # gpu_input_batch.py:569 forgets what the step before sampled for it.
        self._batch.discard(request_id)
        self._previous.pop(request_id, None)

    def _update_cached(self, cached: Any, index: int) -> int:
        """R1:1332-1452. Returns the drafts of the step before that were taken for accepted."""
        request_id, num_output_tokens = cached.req_ids[index], cached.num_output_tokens[index]
        state, in_batch, assumed = self.states[request_id], request_id in self._batch, 0
        if state.prev_num_draft_len and self._shape.asynchronous:
            if in_batch:
                assumed = state.prev_num_draft_len
                state.output_token_ids.extend([PLACEHOLDER] * assumed)
            else:
                state.prev_num_draft_len = 0
        state.num_computed_tokens = cached.num_computed_tokens[index]
        del state.output_token_ids[num_output_tokens:]
        if request_id in cached.resumed_req_ids:
            state.block_ids = list(cached.new_block_ids[index][0])
        elif cached.new_block_ids[index] is not None:
            state.block_ids.extend(cached.new_block_ids[index][0])
        if not in_batch and self._shape.asynchronous and num_output_tokens:
            state.output_token_ids = cached.all_token_ids[request_id][-num_output_tokens:]
        if len(state.output_token_ids) != num_output_tokens:
            raise DisagreementError(
                f"{request_id}: the scheduler counts {num_output_tokens} output tokens and placeholders, the "
                f"worker {len(state.output_token_ids)}"
            )
        return assumed

    def _row(self, output: Any, request_id: str, previous_num_drafts: int) -> Row:
        state = self.states[request_id]
        drafts = list(output.scheduled_spec_decode_tokens.get(request_id, ()))
        num_tokens = output.num_scheduled_tokens[request_id]
        previous = self._previous.get(request_id) if self._shape.asynchronous else None
        is_sampled = state.num_computed_tokens + num_tokens >= len(state.token_ids)
        row = Row(
            request_id=request_id,
            state=state,
            num_tokens=num_tokens,
            drafts=drafts,
            token_ids=state.token_ids,
            block_ids=list(state.block_ids),
            num_computed_tokens=state.num_computed_tokens,
            previous=previous,
            previous_num_drafts=previous_num_drafts,
            is_sampled=is_sampled,
        )
        state.prev_num_draft_len = len(drafts)  # R1 update_req_spec_token_ids
        self._batch.add(request_id)
        if is_sampled and self._shape.asynchronous:
            state.output_token_ids.append(PLACEHOLDER)  # R1 _bookkeeping_sync
        return row

    def _run_row(self, row: Row) -> list[int]:
        truth, num_drafts = row.state.conversation, len(row.drafts)
        num_known = row.num_tokens - num_drafts
        computed = row.num_computed_tokens
        if row.previous and row.previous_num_drafts:
            # spec_decode/utils.py update_num_computed_tokens_for_batch_change
            computed = row.previous.num_computed_tokens + len(row.previous.sampled)
        row.num_computed_tokens = computed
        tokens = row.token_ids[computed : computed + num_known]
        if row.previous:  # R1 _prepare_input_ids
            tokens[-1:] = row.previous.sampled[-1:]
            row.drafts = row.previous.next_drafts[:num_drafts]
        expected = [truth.at(computed + i) for i in range(num_known)]
        if tokens != expected:
            raise DisagreementError(f"{row.request_id}: computes {tokens} at {computed}, not {expected}")
        self._check_kv(row, computed)
        self._write_kv(row, computed, num_known)
        if not row.is_sampled:
            return []
        index = computed + num_known - len(truth.prompt)
        num_accepted = 0
        while num_accepted < num_drafts and row.drafts[num_accepted] == truth.token(index + num_accepted):
            num_accepted += 1
        row.sampled = [truth.token(index + i) for i in range(num_accepted + 1)]
        row.next_drafts = truth.drafts(index + len(row.sampled))
        self._check_draft_slots(row, computed + num_known + num_accepted)
        row.previous = None
        if not self._shape.asynchronous:
            row.state.output_token_ids.extend(row.sampled)
        return list(row.sampled)

    def _check_kv(self, row: Row, computed: int) -> None:
        """Attention reads every position before the row."""
        truth = row.state.conversation
        for position in range(computed):
            held = self.memory[row.block_ids[position // BLOCK_SIZE]][position % BLOCK_SIZE]
            if held != truth.kv(position):
                raise DisagreementError(f"{row.request_id}: KV of position {position} is not its own")

    def _write_kv(self, row: Row, computed: int, num_known: int) -> None:
        truth, right = row.state.conversation, True
        for position in range(computed, computed + row.num_tokens):
            if position // BLOCK_SIZE >= len(row.block_ids):
                raise DisagreementError(f"{row.request_id}: no block for position {position}")
            if position >= computed + num_known:
                right = right and row.drafts[position - computed - num_known] == truth.at(position)
            value = truth.kv(position) if right else WRONG
            self.memory[row.block_ids[position // BLOCK_SIZE]][position % BLOCK_SIZE] = value

    def _check_draft_slots(self, row: Row, num_valid_tokens: int) -> None:
        """The draft model writes K - 1 positions past the last valid one."""
        last = num_valid_tokens + self._shape.num_speculative_tokens - 2
        if last < self._shape.max_model_len and last // BLOCK_SIZE >= len(row.block_ids):
            raise DisagreementError(f"{row.request_id}: no block for draft position {last}")
