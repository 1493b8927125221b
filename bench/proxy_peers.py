"""The routers that the proxy is compared with, each installed into an environment of its own."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.sim_processes import Server, StartError, started, wait_answers
from lockstep.cli.ports import PortPicker

INSTALL_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A router of the package index; `command` comes before the flags that both share."""

    distribution: str
    version: str
    command: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.distribution} {self.version}"


PEERS = (
    Peer("vllm-router", "0.1.17", ("vllm-router", "--log-level", "error")),
    Peer("smg", "1.13.0", ("smg", "launch", "--backend", "vllm", "--log-level", "error")),
)


def installed(peer: Peer) -> Path:
    """The folder of the peer's commands, kept from run to run. Raises StartError where there is none."""
    home = cached(f"{peer.distribution}-{peer.version}")
    pip = [str(home / "bin" / "pip"), "install", "-q", f"{peer.distribution}=={peer.version}"]
    install_once(home, [sys.executable, "-m", "venv", "--clear", str(home)], pip)
    return home / "bin"


def cached(name: str) -> Path:
    """Where something of this name is installed for the benchmarks."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep-bench" / name


def install_once(home: Path, *steps: Sequence[str]) -> None:
    """Run the steps unless they have all succeeded before. Raises StartError."""
    done = home / "installed"
    if done.exists():
        return
    for argv in steps:
        try:
            step = subprocess.run(
                argv, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise StartError(f"{home.name}: not installed within {INSTALL_TIMEOUT_S:g} s") from error
        if step.returncode:
            raise StartError(f"{home.name}: cannot be installed: {step.stderr.strip()[-1000:]}")
    done.touch()


@contextlib.contextmanager
def running(peer: Peer, worker_url: str, directory: Path, ports: PortPicker) -> Iterator[Server]:
    """The router in front of one simulated server, passing requests on. Raises StartError."""
    port = ports.take()
    argv = [str(installed(peer) / peer.command[0]), *peer.command[1:], "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--worker-urls", worker_url, "--policy", "round_robin"]
    argv += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(ports.take())]
    argv += ["--max-concurrent-requests", "4096", "--queue-size", "4096"]
    log = directory / f"{peer.distribution}.log"
    with started(argv, log) as process:
        server = Server(f"http://127.0.0.1:{port}", process)
        wait_answers(process, f"{server.url}/v1/models", log)
        yield server
