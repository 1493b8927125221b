"""Starts the processes of a plan, restarts the ones that die, and stops them all in order."""

import asyncio
import os
import time
from collections.abc import Sequence
from itertools import groupby

from lockstep.cli.plan import StackPlan
from lockstep.cli.process import SupervisedProcess
from lockstep.cli.readiness import ReadinessProbe
from lockstep.cli.reporter import Phase, Reporter
from lockstep.cli.restart import RestartPolicy
from lockstep.cli.state import ProcessState, StackState, StateDirectory

ABORT_S = 10.0
"""Time to stop in order for a stack that never served anybody; after that it is killed."""


class StackFailedError(Exception):
    """The stack did not start or could not be kept up; the message is the one line for the user."""


class Supervisor:
    """One stack, from start to stop; `run` may be called once, `request_stop` at any time."""

    def __init__(
        self,
        plan: StackPlan,
        state: StateDirectory,
        reporter: Reporter,
        *,
        startup_timeout_s: float,
        policy: RestartPolicy | None = None,
    ) -> None:
        self.was_ready = False
        """Whether all processes have been ready at the same time once."""
        self._plan = plan
        self._state = state
        self._reporter = reporter
        self._startup_timeout_s = startup_timeout_s
        self._policy = policy or RestartPolicy()
        self._processes = [SupervisedProcess(spec, state.new_log(spec.role)) for spec in plan.processes]
        self._ready: set[str] = set()
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()

    def request_stop(self) -> None:
        """Stop in order; while that is under way, kill at once."""
        if self._stop.is_set():
            self._kill.set()
        self._stop.set()

    async def run(self) -> None:
        """Keep the stack up until told to stop; no process is left when this returns or raises.

        Raises StackFailedError when a process does not start, or keeps dying.
        """
        keepers = [asyncio.create_task(self._keep(process)) for process in self._processes]
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([*keepers, stop], return_when=asyncio.FIRST_COMPLETED)
            failed = [keeper for keeper in keepers if keeper.done()]
            self._stop.set()
        finally:
            for task in (*keepers, stop):
                task.cancel()
            await asyncio.gather(*keepers, stop, return_exceptions=True)
            await self._end_all()
        for keeper in failed:
            keeper.result()

    async def _keep(self, process: SupervisedProcess) -> None:
        """Run one process for ever; returns only by raising."""
        ready_for_s: list[float] = []
        while True:
            lived_s, failure = await self._run_once(process)
            self._ready.discard(process.spec.role)
            if process.starts == 1 and lived_s == 0.0:
                raise StackFailedError(failure)  # what fails at its first start needs a person
            ready_for_s.append(lived_s)
            delay_s = self._policy.delay_s(ready_for_s)
            if delay_s is None:
                times = self._policy.max_quick_deaths
                raise StackFailedError(
                    f"{failure}; it died {times} times in a row soon after its start, giving up"
                )
            self._reporter.phase(process.spec.role, Phase.DOWN, failure)
            self._reporter.note(f"{failure}; starting it again in {delay_s:.1f} s")
            await asyncio.sleep(delay_s)

    async def _run_once(self, process: SupervisedProcess) -> tuple[float, str]:
        """One run to its end: how long it was ready in seconds (0 if it never was), and how it ended."""
        role = process.spec.role
        self._reporter.phase(role, Phase.STARTING)
        await process.start()
        async with ReadinessProbe(lambda reason: self._reporter.phase(role, Phase.STARTING, reason)) as probe:
            try:
                async with asyncio.timeout(self._startup_timeout_s):
                    exit_code = await process.wait_ready(probe)
            except TimeoutError:
                hint = process.log_hint()
                await process.kill()
                why = f" ({probe.reason})" if probe.reason else ""
                return 0.0, f"{role} was not ready after {self._startup_timeout_s:.0f} s{why}{hint}"
        if exit_code is not None:
            return 0.0, process.failure(exit_code)
        ready_at_s = time.monotonic()
        self._note_ready(process)
        exit_code = await process.wait_ended()
        return time.monotonic() - ready_at_s, process.failure(exit_code)

    def _note_ready(self, process: SupervisedProcess) -> None:
        self._ready.add(process.spec.role)
        self._reporter.phase(process.spec.role, Phase.READY)
        if len(self._ready) < len(self._processes):
            return
        self._state.write(self._describe())
        if not self.was_ready:
            self.was_ready = True
            self._reporter.stack_ready(self._plan)

    def _describe(self) -> StackState:
        processes = tuple(
            ProcessState(
                role=process.spec.role,
                pid=process.pid,
                http_url=process.spec.http_url,
                grpc_address=process.spec.grpc_address,
                log=str(process.log_path.resolve()),
                restarts=process.starts - 1,
            )
            for process in self._processes
        )
        plan = self._plan
        return StackState(os.getpid(), plan.proxy_url, plan.served_model_name, processes, plan.live_url)

    async def _end_all(self) -> None:
        in_order = asyncio.create_task(self._stop_in_waves())
        kill = asyncio.create_task(self._kill.wait())
        limit_s = None if self.was_ready else ABORT_S
        await asyncio.wait((in_order, kill), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        kill.cancel()
        if not in_order.done():
            in_order.cancel()
            await asyncio.gather(in_order, return_exceptions=True)
            await asyncio.gather(*(process.kill() for process in self._processes))

    async def _stop_in_waves(self) -> None:
        ordered = sorted(self._processes, key=_wave)
        for _, wave in groupby(ordered, key=_wave):
            await self._stop_together(list(wave))

    async def _stop_together(self, processes: Sequence[SupervisedProcess]) -> None:
        for process in processes:
            self._reporter.phase(process.spec.role, Phase.STOPPING)
        await asyncio.gather(*(process.stop() for process in processes))


def _wave(process: SupervisedProcess) -> int:
    return process.spec.stop_wave
