"""An engine of `engines.py` in a process of its own, which a test can stop, let go on and kill."""

import functools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from component.kv_transfer.engines import Engine, one_rank_world

from kv_transfer.params import PrefillPeer

_TESTS = str(Path(__file__).parents[2])
_processes = multiprocessing.get_context("forkserver")

_ANSWER_S = 60.0


class EngineProcess:
    """Steps by itself, without a pause.

    `port`: of its side channel, to start it where another one was.
    """

    def __init__(self, role: str, num_blocks: int, extra_config: dict[str, Any], **options: Any) -> None:
        _import_once()
        self._pipe, theirs = _processes.Pipe()
        arguments = (theirs, role, num_blocks, extra_config)
        self._process = _processes.Process(target=_run, args=arguments, kwargs=options, daemon=True)
        self._process.start()
        theirs.close()
        self.engine_id, self.port = self._answer()

    @property
    def peer(self) -> PrefillPeer:
        return PrefillPeer(self.engine_id, "127.0.0.1", self.port, 1)

    @property
    def counters(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("counters")
        return found

    @property
    def idle(self) -> bool:
        """No block in use and no request known."""
        return bool(self.ask("idle"))

    def add(self, request_id: str, prompt: Sequence[int], params: dict[str, Any]) -> None:
        self.ask("add", request_id, list(prompt), params)

    def stop(self) -> None:
        """SIGSTOP: every thread of it, in the middle of whatever it does; returns once it stands still."""
        self._signal(signal.SIGSTOP)
        process = psutil.Process(self._process.pid)
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "it stands still")

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns once it is gone."""
        self._signal(signal.SIGKILL)
        self._process.join(10)
        assert self._process.exitcode == -signal.SIGKILL

    def close(self) -> None:
        if self._process.is_alive():
            self.kill()
        self._pipe.close()

    def ask(self, question: str, *arguments: Any) -> Any:
        self._pipe.send((question, arguments))
        return self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(_ANSWER_S), "the engine's process does not answer"
        return self._pipe.recv()

    def _signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


@functools.cache
def _import_once() -> None:
    """vLLM is imported by the process that all others are forks of; it does not get this one's sys.path."""
    _processes.set_forkserver_preload(["component.kv_transfer.engines"])
    with mock.patch.dict(os.environ, {"PYTHONPATH": _TESTS}):
        forkserver.ensure_running()


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = 20.0) -> None:
    """Poll until the condition holds; AssertionError at the deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {what}"
        time.sleep(0.001)


def _run(pipe: Any, *arguments: Any, **options: Any) -> None:
    # Where one of a group is stopped and the group's last link to its shell ends, the kernel sends SIGHUP and
    # SIGCONT to all of it: that would end Python's resource tracker and wake who is to stand still.
    os.setpgid(0, 0)
    with one_rank_world():
        engine = Engine(*arguments, **options)
        pipe.send((engine.engine_id, engine.port))
        while True:
            engine.step()
            if pipe.poll(0.001):
                question, arguments = pipe.recv()
                pipe.send(_answer(engine, question, *arguments))


def _answer(engine: Engine, question: str, *arguments: Any) -> Any:
    if question == "counters":
        return engine.counters
    if question == "outstanding":
        return engine.outstanding
    if question == "idle":
        return not (engine.scheduler.has_requests() or engine.kv_usage)
    if question == "add":
        engine.add(*arguments)
        return None
    raise ValueError(question)
