"""Which blocks of running prefills each engine step completes, as the scheduler side knows it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kv_transfer.params import TOKEN_KEY
from kv_transfer.push_plan import Chunk, GroupLayout


@dataclass(slots=True)
class _Tracked:
    request: Any  # vllm.v1.request.Request
    sent: list[int]  # place up to which each group's blocks were handed out


class ChunkTracker:
    """Follows requests from their first allocation until they finish.

    With `stream` off the blocks go out together, when the prompt is done.
    """

    def __init__(self, layout: Sequence[GroupLayout], kv_cache_config: Any, *, stream: bool) -> None:
        self._layout = tuple(layout)
        self._kv_cache_config = kv_cache_config
        self._stream = stream
        self._tracked: dict[str, _Tracked] = {}

    def track(self, request: Any) -> None:
        """A request that prefills for a decode node was allocated blocks; again after a preemption."""
        if any(group.streamed for group in self._layout):
            self._tracked[request.request_id] = _Tracked(request, [0] * len(self._layout))

    def token(self, request_id: str) -> str:
        """The attempt's token of a tracked request."""
        return str(self._tracked[request_id].request.kv_transfer_params[TOKEN_KEY])

    def forget(self, request_id: str) -> None:
        self._tracked.pop(request_id, None)

    def step(self, scheduler_output: Any) -> dict[str, Chunk]:
        """The chunk of each scheduled request: valid once the step's forward passes have run.

        vLLM adds this step's tokens to `num_computed_tokens` only afterwards (scheduler.py
        `_update_after_schedule`).
        """
        chunks: dict[str, Chunk] = {}
        state = scheduler_output.kv_connector_block_state
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            table = state.get_block_ids(request_id) if tracked is not None and state is not None else None
            if tracked is None or table is None:
                continue
            num_computed = min(tracked.request.num_computed_tokens + num_tokens, tracked.request.num_tokens)
            chunk = self._chunk(tracked, self._kv_cache_config.select_transfer_block_ids(table), num_computed)
            if chunk is not None:
                chunks[request_id] = chunk
        return chunks

    def _chunk(self, tracked: _Tracked, table: Sequence[list[int]], num_computed: int) -> Chunk | None:
        done = num_computed >= tracked.request.num_tokens
        # A group that is pushed whole is read when the request finishes, and with it the rest.
        last = done and all(group.streamed for group in self._layout)
        if not last and not self._stream:
            return None
        start = tuple(tracked.sent)
        block_ids = []
        for index, group in enumerate(self._layout):
            if group.streamed:
                full = num_computed // group.block_size
                end = -(-num_computed // group.block_size) if last else full
                tracked.sent[index] = max(end, start[index])
            block_ids.append(tuple(table[index][start[index] : tracked.sent[index]]))
        if not last and not any(block_ids):
            return None
        return Chunk(start, tuple(block_ids), last)
