"""A supervisor in a process of its own over fake services, and what it left behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.cli.ports import PortPicker

RUN_STACK = Path(__file__).with_name("run_stack.py")
DEADLINE_S = 90.0  # generous: engines of other tests may hold the cores


def wait_for(what: str, condition: Callable[[], Any]) -> Any:
    """Poll until the condition holds and return its value."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.05)
    return value


class Stack:
    """A running supervisor; every process of it carries the mark of this test in its environment."""

    MARK = "LOCKSTEP_STATE_DIR"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.services: list[dict[str, Any]] = []
        self._ports = PortPicker()
        self._output = directory / "output"
        self._process: subprocess.Popen[bytes] | None = None

    def add(self, role: str, *args: str, **options: Any) -> int:
        """One more fake service; returns its port."""
        port = self._ports.take()
        self.services.append({"role": role, "port": port, "args": list(args), **options})
        return port

    def start(self, startup_timeout_s: float = 60.0) -> None:
        """Start the supervisor in the background."""
        argv = [str(self.directory / "state"), str(startup_timeout_s), json.dumps(self.services)]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(RUN_STACK), *argv],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {self.MARK: str(self.directory)},
            )

    def output(self) -> str:
        """What the supervisor printed so far."""
        return self._output.read_text()

    def log(self, role: str) -> str:
        """What a service printed so far."""
        path = self.directory / "state" / "logs" / f"{role}.log"
        return path.read_text() if path.exists() else ""

    def state(self) -> dict[str, Any]:
        """state.json, or an empty dictionary while there is none."""
        path = self.directory / "state" / "state.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def service_state(self, role: str) -> dict[str, Any]:
        """The entry of one process in state.json, or an empty dictionary while there is none."""
        return next((dict(item) for item in self.state().get("processes", []) if item["role"] == role), {})

    def wait_ready(self) -> None:
        """Until state.json is there."""
        wait_for("state.json", lambda: self.state() or self.ended())
        assert self.state(), self.output()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the supervisor alone."""
        assert self._process is not None
        self._process.send_signal(number)

    def ended(self) -> bool:
        """Whether the supervisor has."""
        return self._process is not None and self._process.poll() is not None

    def wait_exit(self) -> int:
        """The supervisor's exit code."""
        assert self._process is not None
        return self._process.wait(DEADLINE_S)

    def processes(self) -> list[psutil.Process]:
        """All living processes of this test but pytest: supervisor, guards, services, their children."""
        found = []
        for process in psutil.process_iter():
            try:
                marked = process.environ().get(self.MARK) == str(self.directory)
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue  # gone, or not ours to read
        return found

    def clean_up(self) -> None:
        """Kill what a failed test left."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()  # the supervisor first, so that nothing is started again
        if self._process is not None:
            self._process.wait(DEADLINE_S)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path)
    yield stack
    stack.clean_up()


@pytest.fixture(name="wait_for")
def wait_for_fixture() -> Callable[[str, Callable[[], Any]], Any]:
    return wait_for
