"""The scheduler of one simulated decode rank: a row makes steps once its KV is there, or is handed back."""

import random
from collections import deque
from dataclasses import dataclass

from vllm.v1.engine import EngineCoreEventType, FinishReason

from lockstep.bounce import Bounce
from lockstep.sim.answers import GOES_ON, End
from lockstep.sim.pool import KVPool
from lockstep.sim.rows import Row


@dataclass(frozen=True, slots=True)
class Said:
    """What a step gives for one row; tokens are good even where the row is handed back."""

    row: Row
    tokens: list[int]
    end: End


class DecodeRank:
    """Neither waits nor knows the time: `schedule` begins a step and `step` ends it."""

    def __init__(
        self,
        pool: KVPool,
        max_num_seqs: int,
        num_speculative_tokens: int,
        acceptance: float,
        draws: random.Random,
    ) -> None:
        self.pool = pool
        self._max_num_seqs = max_num_seqs
        self._num_speculative_tokens = num_speculative_tokens
        self._acceptance = acceptance
        self._draws = draws
        self.waiting: deque[Row] = deque()
        """Without blocks."""
        self.arriving: dict[str, Row] = {}
        """With blocks, and registered with prefill."""
        self.arrived: deque[Row] = deque()
        self.running: list[Row] = []
        self.drafted = 0
        """Of the last step, like `accepted`."""
        self.accepted = 0

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.arriving) + len(self.arrived)

    def add(self, row: Row) -> None:
        row.note(EngineCoreEventType.QUEUED)
        self.waiting.append(row)

    def take_blocks(self) -> list[Row]:
        """Those that have blocks from now on, and whose KV may come."""
        taken = []
        while self.waiting:
            row = self.waiting[0]
            holding = self.pool.take(row.tokens, None, extra_tokens=1 + self._num_speculative_tokens)
            if holding is None:
                break
            row.holding = holding
            self.arriving[row.request_id] = row
            taken.append(self.waiting.popleft())
        return taken

    def kv_arrived(self, request_id: str) -> None:
        """Late news of a request that has gone changes nothing."""
        row = self.arriving.pop(request_id, None)
        if row is not None:
            self.arrived.append(row)

    def drop(self, request_id: str) -> Row | None:
        """A request is not wanted any more, or its KV does not come."""
        row = self.arriving.pop(request_id, None)
        for rows in (self.waiting, self.arrived, self.running):
            for found in rows if row is None else ():
                if found.request_id == request_id:
                    row = found
                    break
            if row is not None and row in rows:
                rows.remove(row)
        if row is not None:
            self.pool.release(row.holding)
        return row

    def schedule(self) -> int:
        """Let arrived rows in; returns the rows of the next step."""
        while self.arrived and len(self.running) < self._max_num_seqs:
            row = self.arrived.popleft()
            row.note(EngineCoreEventType.SCHEDULED)
            self.running.append(row)
        return len(self.running)

    def step(self) -> list[Said]:
        """The step has run."""
        self.drafted = self._num_speculative_tokens * len(self.running)
        self.accepted = 0
        said = []
        for row in list(self.running):
            tokens, end = self._say(row)
            if end is GOES_ON and not self.pool.grow(row.holding, self._held_tokens(row)):
                end = (FinishReason.ABORT, str(Bounce.PREEMPTED))
            said.append(Said(row, tokens, end))
            if end is not GOES_ON:
                self.running.remove(row)
                self.pool.release(row.holding)
        return said

    def _held_tokens(self, row: Row) -> int:
        generated = row.next_index - len(row.leg.carried)
        return len(row.tokens) + generated + 1 + self._num_speculative_tokens

    def _say(self, row: Row) -> tuple[list[int], End]:
        tokens: list[int] = []
        end = GOES_ON
        for _ in range(1 + self._accepted_drafts()):
            tokens.append(row.script.token(row.next_index))
            end = row.script.end_after(row.next_index, row.max_tokens)
            row.next_index += 1
            if end is not GOES_ON:
                break
        self.accepted += len(tokens) - 1
        return tokens, end

    def _accepted_drafts(self) -> int:
        accepted = 0
        while accepted < self._num_speculative_tokens and self._draws.random() < self._acceptance:
            accepted += 1
        return accepted
