"""The timing of the simulated nodes in one process: a prefill and a decode device side by side, no KV."""

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.sim.config import SimFigures


@dataclass(eq=False, slots=True)
class Row:
    """One request: what it still wants, and what it got in the last step."""

    name: str
    prompt_tokens: int
    tokens_left: int
    new_tokens: int = 0


Step = Callable[[Sequence[Row]], None]
"""Called with the rows that got tokens; a row with no tokens left has ended."""


class SimEngine:
    """Prompts in steps of the budget, then steps of 1 + accepted drafts a row, as lockstep.sim's."""

    def __init__(self, figures: SimFigures, num_speculative_tokens: int, budget: int, on_step: Step) -> None:
        self._figures = figures
        self._num_speculative_tokens = num_speculative_tokens
        self._budget = budget
        self._on_step = on_step
        self._draws = random.Random(figures.sim_seed)
        self._prompts: deque[Row] = deque()
        self._rows: dict[str, Row] = {}
        self._work = {"prefill": asyncio.Event(), "decode": asyncio.Event()}
        self._tasks = [asyncio.create_task(run()) for run in (self._prefill, self._decode)]

    def add(self, row: Row) -> None:
        self._prompts.append(row)
        self._work["prefill"].set()

    def abort(self, name: str) -> None:
        """An unknown one has ended meanwhile."""
        self._rows.pop(name, None)
        self._prompts = deque(row for row in self._prompts if row.name != name)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _prefill(self) -> None:
        free_s = time.monotonic()
        while True:
            free_s = await self._wait_for("prefill", lambda: bool(self._prompts), free_s)
            step, tokens = [], 0
            while self._prompts and tokens + self._prompts[0].prompt_tokens <= self._budget:
                step.append(self._prompts.popleft())
                tokens += step[-1].prompt_tokens
            if not step:  # longer than the budget: alone
                step = [self._prompts.popleft()]
                tokens = step[0].prompt_tokens
            free_s = await _until(free_s, self._figures.prefill_step_s(tokens))
            for row in step:
                row.new_tokens = 1
                row.tokens_left -= 1
            self._on_step(step)
            asyncio.get_running_loop().call_later(
                self._figures.push_s(tokens), self._arrive, [row for row in step if row.tokens_left]
            )

    def _arrive(self, rows: Sequence[Row]) -> None:
        self._rows |= {row.name: row for row in rows}
        self._work["decode"].set()

    async def _decode(self) -> None:
        free_s = time.monotonic()
        while True:
            free_s = await self._wait_for("decode", lambda: bool(self._rows), free_s)
            free_s = await _until(free_s, self._figures.decode_step_s(len(self._rows)))
            step = list(self._rows.values())
            for row in step:
                row.new_tokens = min(1 + self._accepted(), row.tokens_left)
                row.tokens_left -= row.new_tokens
                if not row.tokens_left:
                    del self._rows[row.name]
            self._on_step(step)

    def _accepted(self) -> int:
        accepted = 0
        while accepted < self._num_speculative_tokens and self._draws.random() < self._figures.sim_acceptance:
            accepted += 1
        return accepted

    async def _wait_for(self, side: str, condition: Callable[[], bool], free_s: float) -> float:
        """Returns since when the device is free: an idle one begins a step when there is work for it."""
        while not condition():
            self._work[side].clear()
            await self._work[side].wait()
            free_s = time.monotonic()
        return free_s


async def _until(free_s: float, duration_s: float) -> float:
    """As the simulated nodes pace their steps (lockstep/sim/engine.py)."""
    free_s = max(free_s, time.monotonic() - 0.02) + duration_s
    await asyncio.sleep(free_s - time.monotonic())
    return free_s
