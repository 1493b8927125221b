"""An idle stack is cheap."""

import time

import psutil
from system.harness import Stack

WINDOW_S = 10.0


def _processes(stack: Stack) -> list[psutil.Process]:
    top = psutil.Process(stack.process.pid)
    return [top, *top.children(recursive=True)]


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def test_idle_stack_uses_little_cpu(stack: Stack) -> None:
    """All processes together take less than 15 % of one core; stock NIXL alone would take one per engine."""
    stack.wait_idle()
    processes = _processes(stack)
    before = _cpu_s(processes)
    time.sleep(WINDOW_S)  # the measurement itself
    used = _cpu_s(processes) - before
    assert used / WINDOW_S < 0.15, [(process.pid, process.name()) for process in processes]


def test_stack_fits_in_7_gb(stack: Stack) -> None:
    """Resident memory of all processes together, shared pages counted once for each."""
    resident = {process.pid: process.memory_info().rss for process in _processes(stack)}
    assert sum(resident.values()) < 7e9, resident
