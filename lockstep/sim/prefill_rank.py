"""The scheduler of one simulated prefill rank: first come, first served, in chunks of the step's budget."""

from collections import deque

from vllm.v1.engine import EngineCoreEventType

from lockstep.sim.pool import KVPool
from lockstep.sim.rows import Row


class PrefillRank:
    """Neither waits nor knows the time: `schedule` begins a step and `step` ends it."""

    def __init__(self, pool: KVPool, max_num_seqs: int, max_tokens_a_step: int) -> None:
        self.pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_tokens_a_step = max_tokens_a_step
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def add(self, row: Row) -> None:
        row.note(EngineCoreEventType.QUEUED)
        self.waiting.append(row)

    def drop(self, request_id: str) -> Row | None:
        """A request whose prompt is not computed yet is not wanted any more."""
        for rows in (self.waiting, self.running):
            for row in rows:
                if row.request_id == request_id:
                    rows.remove(row)
                    self.pool.release(row.holding)
                    return row
        return None

    def schedule(self) -> int:
        """Choose what the next step computes; returns its tokens, 0 if there is nothing to do."""
        budget = self._max_tokens_a_step
        for row in self.running:
            row.chunk = min(budget, len(row.tokens) - row.computed)
            budget -= row.chunk
        while budget and self.waiting and len(self.running) < self._max_num_seqs:
            row = self.waiting[0]
            holding = self.pool.take(row.tokens, row.request.cache_salt)
            if holding is None:
                break
            row.holding, row.computed = holding, holding.cached_tokens
            row.note(EngineCoreEventType.SCHEDULED)
            row.chunk = min(budget, len(row.tokens) - row.computed)
            budget -= row.chunk
            self.running.append(self.waiting.popleft())
        return self._max_tokens_a_step - budget

    def step(self) -> list[Row]:
        """The step has run: the rows whose prompts are whole now; they keep their blocks."""
        done = []
        for row in self.running:
            row.computed += row.chunk
            row.chunk = 0
            if row.computed >= len(row.tokens):
                self.pool.name(row.holding, row.tokens, row.request.cache_salt)
                done.append(row)
        self.running = [row for row in self.running if row not in done]
        return done
