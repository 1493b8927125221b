"""The processes of one system: started together, watched, weighed, and stopped with all they started."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.sim_processes import StartError

STOP_DEADLINE_S = 40.0
LOG_TAIL_BYTES = 4000


@dataclass(frozen=True, slots=True)
class Program:
    """One process to start; `environment` is all that it sees."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Layout:
    """A system before it runs: its endpoint and its programs, all of them started at once."""

    url: str
    programs: tuple[Program, ...]


@dataclass(frozen=True, slots=True)
class Running:
    """A system that was started; it may not answer yet."""

    url: str
    started_at_s: float
    logs: Path
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def cpu_s(self) -> float:
        """Processor time so far, user and system, of every process of the system that is alive."""
        total = 0.0
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def memory_mib(self) -> float:
        """Resident now: proportional set sizes, so that pages that processes share count once."""
        return sum(_pss_bytes(process.pid) for process in self.tree()) / 2**20

    def tree(self) -> list[psutil.Process]:
        """Every living process of the system."""
        found: dict[int, psutil.Process] = {}
        for process in self.processes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(process.pid)
                for member in (parent, *parent.children(recursive=True)):
                    found[member.pid] = member
        return list(found.values())

    def check_alive(self) -> None:
        """Raise StartError, with the end of its log, if one of the programs has ended."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise StartError(f"{name} ended with {process.returncode}: {self.log_tail(name)}")

    def log_tail(self, name: str) -> str:
        log = (self.logs / f"{name}.log").read_bytes()
        return log[-LOG_TAIL_BYTES:].decode(errors="replace")


@contextlib.contextmanager
def running(layout: Layout, directory: Path) -> Iterator[Running]:
    """Start all programs; at the end none of their processes is left."""
    system = Running(layout.url, time.monotonic(), directory)
    try:
        for program in layout.programs:
            system.processes[program.name] = _start(program, directory)
        yield system
    finally:
        _stop(system)


def _start(program: Program, directory: Path) -> "subprocess.Popen[bytes]":
    with (directory / f"{program.name}.log").open("wb") as log:
        return subprocess.Popen(
            program.argv,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(program.environment),
            cwd=directory,
            start_new_session=True,
        )


def _stop(system: Running) -> None:
    """SIGINT to each program, as Ctrl-C does; whatever is left at the deadline is killed."""
    tree = system.tree()
    for process in system.processes.values():
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    _, alive = psutil.wait_procs(tree, timeout=STOP_DEADLINE_S)
    _kill(alive)
    for process in system.processes.values():
        process.wait(STOP_DEADLINE_S)


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _pss_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as rollup:
            return sum(1024 * int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return 0


def own_cpu_s() -> float:
    """Processor time of this process: the load generator's."""
    times = os.times()
    return times.user + times.system
