"""Watches the memory of everybody that the soak runs."""

import asyncio
import contextlib
import statistics
import time

import psutil

SAMPLE_EVERY_S = 5.0
EDGE_SAMPLES = 6
"""Half a minute at the start and at the end is compared."""


class Memory:
    """Resident bytes over time of all processes below one."""

    def __init__(self, parent: psutil.Process) -> None:
        self._parent = parent
        self._samples: dict[psutil.Process, list[int]] = {}
        self._names: dict[psutil.Process, str] = {}

    async def sample_forever(self, warm_up_s: float) -> None:
        """From the end of the warm-up on; a process that starts later is not watched."""
        await asyncio.sleep(warm_up_s)
        for process in self._parent.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie counts as one
                self._names[process] = " ".join(process.cmdline())[-60:]
                self._samples[process] = []
        while True:
            began_s = time.monotonic()
            for process, samples in self._samples.items():
                with contextlib.suppress(psutil.NoSuchProcess):
                    samples.append(process.memory_info().rss)
            await asyncio.sleep(SAMPLE_EVERY_S - (time.monotonic() - began_s))

    def growth(self) -> dict[str, tuple[int, float]]:
        """(MiB at the end, growth as a share) of each process that lived until now."""
        grown = {}
        for process, samples in self._samples.items():
            if process.is_running() and len(samples) >= 2 * EDGE_SAMPLES:
                first = statistics.median(samples[:EDGE_SAMPLES])
                last = statistics.median(samples[-EDGE_SAMPLES:])
                grown[f"{process.pid} {self._names[process]}"] = (round(last / 2**20), last / first - 1)
        return grown
