"""One guarded process of a stack: start, ready or not, exit, stop."""

import asyncio
import os
import signal
import subprocess
from pathlib import Path

from lockstep.cli.guard import guard_argv
from lockstep.cli.logfile import error_line
from lockstep.cli.plan import ProcessSpec
from lockstep.cli.readiness import ReadinessProbe

_PID_TIMEOUT_S = 30.0
_KILL_TIMEOUT_S = 10.0
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT})


class SupervisedProcess:
    """At most one run at a time; every method but `pid` and `log_path` belongs to the event loop's thread.

    It has to be the main thread: the kernel tells a guard of the death of the thread that started it.
    """

    def __init__(self, spec: ProcessSpec, log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        self.pid = 0
        """Of the service itself, not of its guard; 0 before the first start."""
        self.starts = 0
        self._guard: subprocess.Popen[bytes] | None = None
        self._ended = asyncio.Event()
        self._log_offset_bytes = 0

    async def start(self) -> None:
        """Start a run that appends to the log."""
        read_fd, write_fd = os.pipe()
        try:
            self._launch(write_fd)
        finally:
            os.close(write_fd)
        try:
            # Ends at the latest when the guard does, which closes its end of the pipe.
            text = await asyncio.wait_for(asyncio.to_thread(os.read, read_fd, 32), _PID_TIMEOUT_S)
        finally:
            os.close(read_fd)
        self.pid = int(text or b"0")

    async def wait_ready(self, probe: ReadinessProbe) -> int | None:
        """Wait until the process is ready (None) or has ended (its exit code); cancel to set a deadline."""
        ready = asyncio.create_task(probe.wait_ready(self.spec.http_url))
        ended = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait((ready, ended), return_when=asyncio.FIRST_COMPLETED)
            return self._exit_code() if ended.done() else None
        finally:
            ready.cancel()
            ended.cancel()

    async def wait_ended(self) -> int:
        """Wait for the end of the run and return its exit code, 128 + n if signal n ended it."""
        await self._ended.wait()
        return self._exit_code()

    async def stop(self) -> None:
        """SIGTERM, the time of its spec, SIGKILL; returns when nothing of the run is left."""
        if self._guard is None:
            return
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._ended.wait(), self.spec.stop_s + _KILL_TIMEOUT_S)
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """SIGKILL all of the run at once; returns when nothing of it is left."""
        if self._guard is None:
            return
        self._signal(signal.SIGQUIT)
        try:
            await asyncio.wait_for(self._ended.wait(), _KILL_TIMEOUT_S)
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self._ended.wait()

    def failure(self, exit_code: int) -> str:
        """One line for a user: how it ended, what its log says, where the log is."""
        number = exit_code - 128
        if number in _FROM_OUTSIDE:
            # The log cannot know why; its last lines are about something else.
            return f"{self.spec.role} was ended by {signal.Signals(number).name} (log: {self.log_path})"
        how = f"exited with code {exit_code}"
        if number in set(signal.Signals):
            how = f"was ended by {signal.Signals(number).name}"
        return f"{self.spec.role} {how}{self.log_hint()}"

    def log_hint(self) -> str:
        """What the log of this run says about an error, and where it is."""
        line = error_line(self.log_path, self._log_offset_bytes)
        return f": {line} (log: {self.log_path})" if line else f" (log: {self.log_path})"

    def _launch(self, pid_fd: int) -> None:
        with self.log_path.open("ab") as log:
            self._log_offset_bytes = log.tell()
            self._guard = subprocess.Popen(
                guard_argv(self.spec.argv, os.getpid(), pid_fd, self.spec.stop_s),
                env=self.spec.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(pid_fd,),
                start_new_session=True,
            )
        self.starts += 1
        self._ended = asyncio.Event()
        self._watch(self._guard)

    def _watch(self, guard: subprocess.Popen[bytes]) -> None:
        loop = asyncio.get_running_loop()
        pidfd = os.pidfd_open(guard.pid)
        ended = self._ended

        def on_exit() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            guard.wait()
            ended.set()

        loop.add_reader(pidfd, on_exit)

    def _exit_code(self) -> int:
        assert self._guard is not None, "asked for an exit code before the first start"
        code = self._guard.returncode
        if code < 0 and self.pid:
            # Somebody killed the guard itself: the kernel ends the service, its engines are left to us.
            _kill_group(self.pid)
        return code if code >= 0 else 128 - code

    def _signal(self, number: signal.Signals) -> None:
        assert self._guard is not None
        if not self._ended.is_set():
            self._guard.send_signal(number)


def _kill_group(pgid: int) -> None:
    try:
        os.killpg(pgid, signal.SIGKILL)
    except ProcessLookupError:
        return
