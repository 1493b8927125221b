"""The `lockstep batch` command: runs a batch file, shows how far it is, and stops in order on Ctrl-C."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from lockstep.batch import requests_file
from lockstep.batch.asking import Asker, Patience
from lockstep.batch.results import Results
from lockstep.batch.run import Stop, run
from lockstep.cli.status import key_headers
from lockstep.errors import ConfigError

_CONNECT_S = 10.0
_LINE_EVERY_S = 10.0
"""How often progress is told where there is no terminal."""


@dataclass(frozen=True, slots=True)
class BatchCommand:
    """What the command line asks for."""

    requests: Path
    output: Path
    errors: Path
    url: str
    concurrency: int
    max_tries: int
    timeout_s: float
    again_failed: bool
    key_file: Path | None


def run_batch(command: BatchCommand, console: Console) -> int:
    """Returns the exit code: 0 if all are answered, 1 if some are not, 130 if it was stopped before the end.

    Raises ConfigError for a bad file or key, UnavailableError when nobody answers; what is done is kept.
    """
    paths = {path.resolve() for path in (command.requests, command.output, command.errors)}
    if len(paths) < 3:
        raise ConfigError("the input, --output and --errors are not three files; give each its own name")
    wanted = requests_file.check(command.requests)
    with Results(command.output, command.errors, wanted, again_failed=command.again_failed) as results:
        before = len(results.succeeded) + len(results.failed)
        if before:
            console.print(f"{before} of {len(wanted)} requests are done already", highlight=False)
        view = _View(console, results, len(wanted))
        with view.shown():
            stopped = asyncio.run(_run(command, results, view))
    done, failed = len(results.succeeded), len(results.failed)
    console.print(f"{done} answers in {command.output}", highlight=False, markup=False, soft_wrap=True)
    if failed:
        said = f"{failed} errors in {command.errors}; --retry-failed asks these again"
        console.print(said, highlight=False, markup=False, soft_wrap=True)
    if stopped:
        console.print("Stopped; the same command goes on from here.")
        return 130
    return 1 if failed else 0


async def _run(command: BatchCommand, results: Results, view: "_View") -> bool:
    """Whether it was stopped. The first signal lets running requests end, the second gives them up."""
    stop = Stop()
    headers = _headers(command.key_file)
    timeout = httpx.Timeout(command.timeout_s, connect=_CONNECT_S)
    limits = httpx.Limits(max_connections=command.concurrency, max_keepalive_connections=command.concurrency)
    async with _client(command.url, headers, timeout, limits) as client:
        asker = Asker(client, Patience(command.max_tries))
        requests = requests_file.read(command.requests)
        running = asyncio.create_task(
            run(requests, asker, results, command.concurrency, stop, view.progressed), name="batch"
        )

        def interrupt() -> None:
            if stop.asked:
                running.cancel()
            stop.asked = True
            view.say("Stopping when the running requests have ended; once more stops now.")

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        try:
            await running
        except asyncio.CancelledError:
            return True
    return stop.asked and len(results.succeeded) + len(results.failed) < view.total


def _client(
    url: str, headers: dict[str, str], timeout: httpx.Timeout, limits: httpx.Limits
) -> httpx.AsyncClient:
    try:
        # A proxy of the environment is for other places; certificates are loaded only where needed.
        return httpx.AsyncClient(
            base_url=url.rstrip("/"),
            headers=headers,
            timeout=timeout,
            limits=limits,
            trust_env=False,
            verify=url.startswith("https:"),
        )
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigError(
            f"--url: {url!r} is no address: {error}; give one such as http://host:8000"
        ) from None


def _headers(key_file: Path | None) -> dict[str, str]:
    """A file of the command goes before the variable that OpenAI's own clients read."""
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if key_file is None and key:
        return {"Authorization": f"Bearer {key}"}
    return key_headers(key_file)


@dataclass(slots=True, eq=False)
class _View:
    """A bar on a terminal, a line now and then elsewhere."""

    console: Console
    results: Results
    total: int
    _progress: Progress = field(init=False)
    _told_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]}", style="red"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )

    @contextmanager
    def shown(self) -> Iterator[None]:
        self._progress.add_task("requests", total=self.total, completed=self._done, failed="")
        with self._progress:
            yield

    @property
    def _done(self) -> int:
        return len(self.results.succeeded) + len(self.results.failed)

    def progressed(self) -> None:
        """One more has ended."""
        failed = f"{len(self.results.failed)} failed" if self.results.failed else ""
        for task in self._progress.task_ids:
            self._progress.update(task, completed=self._done, failed=failed)
        if not self.console.is_terminal and time.monotonic() - self._told_s >= _LINE_EVERY_S:
            self._told_s = time.monotonic()
            self.say(f"{self._done} of {self.total}{', ' if failed else ''}{failed}")

    def say(self, line: str) -> None:
        self.console.print(line, highlight=False)
