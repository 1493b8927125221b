"""Keeps N workers running on one socket: starts them, starts them again, passes on the order to stop."""

import asyncio
import contextlib
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import multiprocess

from proxy.workers.place import Place

logger = logging.getLogger("proxy.workers")

MULTIPROC_DIR = "PROMETHEUS_MULTIPROC_DIR"
"""Where prometheus_client's processes write their values; vLLM's /metrics then shows all of them."""

WORKER = (sys.executable, "-P", "-m", "proxy.workers.worker")
"""What a worker is started with, before its place and the proxy's own arguments."""

_BACKOFF_FIRST_S = 0.5
_BACKOFF_MOST_S = 30.0
_STABLE_S = 60.0
"""A worker that has lived so long is started again at once."""


@dataclass(frozen=True, slots=True)
class Task:
    """What there is to supervise. `patience_s`: how long workers get to stop before they are killed."""

    socket_fd: int
    num_workers: int
    patience_s: float


class Supervisor:
    """Imports no vLLM, so that it stays small and never dies of what a request does.

    As long as no worker serves, one at a time is started, and it answers the health routes. The socket stays
    open here, so connections wait while workers come and go. Everything happens on one event loop.
    """

    def __init__(self, task: Task, argv: Sequence[str], command: Sequence[str] = WORKER) -> None:
        self._task = task
        self._argv = argv
        self._command = command
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()
        self._num_ready = 0
        self._num_starting = 0
        self._ever_ready = False
        self._code = 0
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._metrics_dir = ""
        self._lifeline = (-1, -1)

    async def run(self) -> int:
        """Until SIGTERM or SIGINT; the exit code is 0, or a worker's if none ever came to serve."""
        loop = asyncio.get_running_loop()
        for order in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(order, self._stop.set)
        self._metrics_dir = tempfile.mkdtemp(prefix="lockstep-metrics-")
        self._lifeline = os.pipe()
        try:
            async with asyncio.TaskGroup() as slots:
                for number in range(1, self._task.num_workers + 1):
                    slots.create_task(self._keep(number), name=f"worker {number}")
                slots.create_task(self._end(), name="end")
        finally:
            for end in self._lifeline:
                os.close(end)
            shutil.rmtree(self._metrics_dir, ignore_errors=True)
        return self._code

    async def _keep(self, number: int) -> None:
        """One worker after the other in the same place."""
        backoff_s = _BACKOFF_FIRST_S
        while await self._may_start():
            started_s = time.monotonic()
            code = await self._run_once(number)
            if self._stop.is_set():
                return
            if not self._ever_ready:
                logger.error("worker %d could not start (exit code %d), so none will", number, code)
                self._code = code or 1
                self._stop.set()
                return
            if time.monotonic() - started_s > _STABLE_S:
                backoff_s = _BACKOFF_FIRST_S
            wait_s = backoff_s * random.uniform(0.8, 1.2)
            logger.warning("worker %d ended (exit code %d); the next one in %.1f s", number, code, wait_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), wait_s)
            backoff_s = min(2 * backoff_s, _BACKOFF_MOST_S)

    async def _may_start(self) -> bool:
        """Wait until another one serves or none is about to; False when it is time to stop."""
        while not self._stop.is_set() and self._num_starting and not self._num_ready:
            self._changed.clear()
            await self._changed.wait()
        return not self._stop.is_set()

    async def _run_once(self, number: int) -> int:
        """From start to end; the exit code, negative for a signal."""
        ready_fd, told_fd = os.pipe()
        place = Place(
            number=number,
            of=self._task.num_workers,
            socket_fd=self._task.socket_fd,
            ready_fd=told_fd,
            lifeline_fd=self._lifeline[0],
            answers_health=not self._num_ready,
        )
        self._num_starting += 1
        try:
            process = await asyncio.create_subprocess_exec(
                *(*self._command, place.argument(), *self._argv),
                pass_fds=(place.socket_fd, place.ready_fd, place.lifeline_fd),
                env=os.environ | {MULTIPROC_DIR: self._metrics_dir},
            )
            os.close(told_fd)
            self._processes[number] = process
            if self._stop.is_set():
                process.terminate()
            ready = await _first_byte(ready_fd)
        finally:
            self._num_starting -= 1
        if ready:
            logger.info("worker %d of %d serves (pid %d)", number, place.of, process.pid)
            self._ever_ready = True
        self._num_ready += ready
        self._changed.set()
        code = await process.wait()
        self._num_ready -= ready
        self._changed.set()
        del self._processes[number]
        # Its counters stay in the totals; what it was doing is no more.
        multiprocess.mark_process_dead(process.pid, self._metrics_dir)  # type: ignore[no-untyped-call]
        return code

    async def _end(self) -> None:
        """Pass the order to stop on, and kill whatever has not obeyed in time."""
        await self._stop.wait()
        self._changed.set()
        for process in list(self._processes.values()):
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        deadline_s = time.monotonic() + self._task.patience_s
        while self._processes and time.monotonic() < deadline_s:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), deadline_s - time.monotonic())
        for number, process in list(self._processes.items()):
            logger.error("worker %d did not stop within %g s and is killed", number, self._task.patience_s)
            with contextlib.suppress(ProcessLookupError):
                process.kill()


async def _first_byte(fd: int) -> bool:
    """Whether a byte comes before the other end is closed. Closes the pipe."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        await readable.wait()
        return bool(os.read(fd, 1))
    finally:
        loop.remove_reader(fd)
        os.close(fd)
