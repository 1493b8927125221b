"""The time that steps of a simulated engine take."""

import asyncio
import time
from typing import Any

from lockstep.sim.config import SimFigures
from lockstep.sim.engine import SimulatedEngine

STEP_S = 0.02


class TwoBursts(SimulatedEngine):
    """A step, a pause in which nothing is there to do, and a step again."""

    ranks = ()

    def __init__(self) -> None:
        parallel = type("Parallel", (), {"data_parallel_size": 0})
        config: Any = type("Config", (), {"parallel_config": parallel})
        super().__init__(SimFigures(), config, None, None)  # type: ignore[arg-type]  # neither is used
        self.todo = 0
        self.ended_s: list[float] = []

    def schedule(self) -> float | None:
        return STEP_S if self.todo else None

    def end_step(self) -> None:
        self.todo -= 1
        self.ended_s.append(time.monotonic())


async def test_a_step_after_a_pause_takes_its_whole_time() -> None:
    """What a late timer costs is taken off the next step, the time of a pause is not."""
    engine = TwoBursts()
    engine.start()
    for number in (1, 2):
        engine.todo = 1
        begun_s = time.monotonic()
        engine.wake()
        async with asyncio.timeout(5):
            while len(engine.ended_s) < number:  # noqa: ASYNC110 - a step of the engine's own task
                await asyncio.sleep(0.001)
        assert engine.ended_s[-1] - begun_s >= 0.95 * STEP_S
        await asyncio.sleep(3 * STEP_S)
    await engine.shutdown()
