"""Fixture: a simulated prefill and decode node in processes of their own, as `lockstep sim` starts them."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from lockstep.cli.ports import PortPicker

START_DEADLINE_S = 180.0  # generous: engines of other tests may hold the cores
STOP_DEADLINE_S = 15.0

PREFILL_STEP_MS = 5
US_PER_TOKEN = 200
DECODE_STEP_MS = 10
US_PER_ROW = 5000


@dataclass(frozen=True)
class SimNode:
    """One running node."""

    address: str
    http_url: str
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def sim_node(role: str, directory: Path, ports: PortPicker, *flags: str) -> Iterator[SimNode]:
    """Start one; it is not waited for."""
    port, http_port = ports.take(), ports.take()
    side_channel_port = ports.take_range(2)
    argv = [str(Path(sys.executable).with_name("lockstep")), "sim", role, "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--http-port", str(http_port), "--side-channel-host", "127.0.0.1"]
    argv += ["--side-channel-port", str(side_channel_port), *flags]
    with (directory / f"{role}.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield SimNode(f"127.0.0.1:{port}", f"http://127.0.0.1:{http_port}", process)
        finally:
            process.terminate()
            try:
                process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_DEADLINE_S)


def wait_ready(node: SimNode) -> None:
    deadline_s = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline_s:
        assert node.process.poll() is None, "the node ended; its log says why"
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{node.http_url}/readyz").status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"not ready within {START_DEADLINE_S:g} s")


@pytest.fixture(scope="module")
def sim_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SimNode, SimNode]]:
    """Prefill, and decode with two ranks and K = 2."""
    directory, ports = tmp_path_factory.mktemp("sim"), PortPicker()
    both = [
        *("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}', "--block-size", "16"),
        *("--sim-prefill-step-ms", str(PREFILL_STEP_MS), "--sim-prefill-us-per-token", str(US_PER_TOKEN)),
        *("--sim-decode-step-ms", str(DECODE_STEP_MS), "--sim-decode-us-per-row", str(US_PER_ROW)),
        *("--sim-acceptance", "1"),
    ]
    with (
        sim_node("prefill", directory, ports, *both) as prefill,
        sim_node("decode", directory, ports, *both, "--data-parallel-size", "2") as decode,
    ):
        for node in (prefill, decode):
            wait_ready(node)
        yield prefill, decode
