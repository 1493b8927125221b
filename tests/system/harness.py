"""Starts the real stack, asks it, and reads its metrics."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from lockstep.node import ipc_folder

REPOSITORY = Path(__file__).parents[2]
PICO = REPOSITORY / "models" / "pico"
START_TIMEOUT_S = 300.0
"""Three engines that import vLLM on two shared cores."""

Series = dict[tuple[tuple[str, str], ...], float]


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float, interval_s: float = 0.1) -> None:
    """Poll until the condition holds; AssertionError at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(interval_s)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def scrape(url: str, name: str) -> Series:
    """All series of one metric that a server's /metrics has, by their sorted labels."""
    text = httpx.get(f"{url}/metrics", timeout=10).text
    return {
        tuple(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


@dataclass(frozen=True)
class Node:
    """One node of the stack, as state.json names it."""

    role: str
    pid: int
    http_url: str
    grpc_address: str

    def metric(self, name: str) -> Series:
        """All series of one metric, by their sorted labels."""
        return scrape(self.http_url, name)

    def by_rank(self, name: str) -> dict[str, float]:
        """One value per rank, summed over the other labels."""
        totals: dict[str, float] = {}
        for labels, value in self.metric(name).items():
            rank = dict(labels)["rank"]
            totals[rank] = totals.get(rank, 0.0) + value
        return totals

    def kv_events(self, kind: str) -> float:
        """`lockstep_kv_events_total` of one kind, summed over ranks and reasons."""
        series = self.metric("lockstep_kv_events_total")
        return sum(value for labels, value in series.items() if dict(labels)["kind"] == kind)

    def ready(self) -> bool:
        """Whether it says that it takes requests; no if it says nothing."""
        try:
            return httpx.get(f"{self.http_url}/readyz", timeout=2).status_code == 200
        except httpx.TransportError:
            return False


@dataclass(frozen=True)
class Stack:
    """A running `lockstep up`."""

    url: str
    state_dir: Path
    process: subprocess.Popen[bytes]

    def node(self, role: str) -> Node:
        state = json.loads((self.state_dir / "state.json").read_text())
        entry = next(item for item in state["processes"] if item["role"] == role)
        return Node(
            role=role, pid=entry["pid"], http_url=entry["http_url"], grpc_address=entry["grpc_address"]
        )

    @property
    def live_url(self) -> str:
        """The proxy's live page."""
        url: str = json.loads((self.state_dir / "state.json").read_text())["live_url"]
        return url

    @property
    def prefill(self) -> Node:
        return self.node("prefill")

    @property
    def decode(self) -> Node:
        return self.node("decode")

    def kv_usage(self) -> list[float]:
        """Share of KV blocks in use on every rank of both sides."""
        return [
            value
            for node in (self.prefill, self.decode)
            for value in node.metric("lockstep_kv_cache_usage_ratio").values()
        ]

    def wait_idle(self, timeout_s: float = 20.0) -> None:
        """Until no rank runs, queues or holds anything, which also lets the last counters arrive."""

        def idle() -> bool:
            busy = [
                value
                for node in (self.prefill, self.decode)
                for name in ("lockstep_requests_running", "lockstep_requests_waiting")
                for value in node.metric(name).values()
            ]
            return not any(busy) and not any(self.kv_usage())

        wait_until(idle, "no request and no KV block left on any rank", timeout_s)
        time.sleep(1.2)  # one telemetry interval: counters are read from the engines once a second


@contextmanager
def run_stack(directory: Path, *flags: str) -> Iterator[Stack]:
    """`lockstep up` with default flags; at the end no process or socket folder of it may be left."""
    port = free_port()
    command = [str(Path(sys.executable).parent / "lockstep"), "up", str(PICO), "--port", str(port)]
    log = (directory / "up.log").open("wb")
    process = subprocess.Popen(
        [*command, "--state-dir", str(directory), *flags],
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        cwd=directory,
    )
    children: list[psutil.Process] = []
    folders: list[Path] = []
    try:
        _wait_for_state(process, directory)
        yield Stack(f"http://127.0.0.1:{port}", directory, process)
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        folders = [folder for child in children for folder in _socket_folders(child.pid)]
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=120)
        log.close()
    assert code == 0, (directory / "up.log").read_text()[-2000:]
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive, f"left behind: {alive}"
    assert folders, "each node has one"
    assert not [folder for folder in folders if folder.exists()]


def _socket_folders(pid: int) -> Iterator[Path]:
    return Path(gettempdir()).glob(f"{ipc_folder.prefix(pid)}*")


def _wait_for_state(process: subprocess.Popen[bytes], directory: Path) -> None:
    def up() -> bool:
        assert process.poll() is None, (directory / "up.log").read_text()[-2000:]
        return (directory / "state.json").exists()

    wait_until(up, "the stack is up", START_TIMEOUT_S)


def completion_body(prompt: list[int], **extra: Any) -> dict[str, Any]:
    """A greedy completion of token ids that also returns token ids."""
    body = {"model": "pico", "prompt": prompt, "temperature": 0, "max_tokens": 40, "return_token_ids": True}
    return body | extra


async def complete_all(
    url: str, bodies: list[dict[str, Any]], concurrency: int, headers: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """POST all bodies to /v1/completions, `concurrency` at a time; answers in order."""
    slots = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=120, headers=headers) as client:

        async def one(body: dict[str, Any]) -> dict[str, Any]:
            async with slots:
                answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            result: dict[str, Any] = answer.json()
            return result

        return await asyncio.gather(*map(one, bodies))
