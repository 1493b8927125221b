"""Starts the processes of the benchmarks without engines: simulated nodes, the proxy, and servers like it."""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from lockstep.cli.ports import PortPicker

LOCKSTEP = str(Path(sys.executable).with_name("lockstep"))
START_DEADLINE_S = 180.0
STOP_DEADLINE_S = 20.0
K = 2

_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}


class StartError(Exception):
    """A process did not come up; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running process that answers HTTP at `url`."""

    url: str
    process: subprocess.Popen[bytes]
    grpc_address: str = ""

    def cpu_s(self) -> float:
        """Processor time so far, of the process and its children."""
        return sum(sum(found.cpu_times()[:2]) for found in self._all())

    def memory_mib(self) -> float:
        """Resident now, of the process and its children."""
        return sum(found.memory_info().rss for found in self._all()) / 2**20

    def _all(self) -> list[psutil.Process]:
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]


@contextlib.contextmanager
def started(
    argv: Sequence[str], log: Path, environment: Mapping[str, str] = os.environ
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process; it is stopped at the end, with SIGTERM first."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(argv), stdout=out, stderr=subprocess.STDOUT, env={**environment, **_ENVIRONMENT}
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_DEADLINE_S)


def wait_answers(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Until `url` answers 200; raises StartError at the deadline, or when the process has ended."""
    deadline_s = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with (
            contextlib.suppress(OSError, urllib.error.URLError),
            urllib.request.urlopen(url, timeout=5) as answer,
        ):
            if answer.status == 200:
                return
        time.sleep(0.1)
    raise StartError(f"{url} does not answer: {log.read_text(errors='replace')[-600:]}")


@contextlib.contextmanager
def sim_nodes(
    directory: Path, ports: PortPicker, prefill_flags: Sequence[str], decode_flags: Sequence[str]
) -> Iterator[tuple[Server, Server]]:
    """A simulated prefill and decode node with K = 2, ready."""
    with contextlib.ExitStack() as stack:
        servers = []
        for role, flags in (("prefill", prefill_flags), ("decode", decode_flags)):
            port, http_port, side_channel_port = ports.take(), ports.take(), ports.take_range(4)
            argv = [LOCKSTEP, "sim", role, "--host", "127.0.0.1", "--port", str(port)]
            argv += ["--http-port", str(http_port), "--side-channel-host", "127.0.0.1"]
            argv += ["--side-channel-port", str(side_channel_port), *flags]
            argv += ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": K})]
            process = stack.enter_context(started(argv, directory / f"{role}.log"))
            servers.append(Server(f"http://127.0.0.1:{http_port}", process, f"127.0.0.1:{port}"))
        for role, server in zip(("prefill", "decode"), servers, strict=True):
            wait_answers(server.process, f"{server.url}/readyz", directory / f"{role}.log")
        yield servers[0], servers[1]


@contextlib.contextmanager
def proxy(
    directory: Path, ports: PortPicker, prefill: Server, decode: Server, *flags: str
) -> Iterator[Server]:
    """`lockstep proxy` over two nodes, ready; serves "pico"."""
    port = ports.take()
    argv = [LOCKSTEP, "proxy", "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "pico"]
    argv += ["--prefill", prefill.grpc_address, "--decode", decode.grpc_address]
    argv += ["--disable-uvicorn-access-log", *flags]
    with started(argv, directory / "proxy.log") as process:
        server = Server(f"http://127.0.0.1:{port}", process)
        wait_answers(process, f"{server.url}/readyz", directory / "proxy.log")
        yield server
