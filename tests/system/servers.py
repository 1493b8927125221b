"""Starts single servers: plain vLLM for comparison, and more proxies and nodes beside a stack."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import httpx
from system.harness import PICO, START_TIMEOUT_S, Node, free_port, wait_until

NUM_SPECULATIVE_TOKENS = 2
SPECULATIVE = json.dumps({"method": "mtp", "num_speculative_tokens": NUM_SPECULATIVE_TOKENS})


@contextmanager
def run_proxy(prefill: Sequence[Node], decode: Sequence[Node], directory: Path, *flags: str) -> Iterator[str]:
    """One more proxy over these nodes, with front-end flags of its own; yields its URL."""
    port = free_port()
    command = [sys.executable, "-P", "-m", "proxy", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prefill", ",".join(node.grpc_address for node in prefill)]
    command += ["--decode", ",".join(node.grpc_address for node in decode)]
    command += ["--served-model-name", "pico", *flags]
    with (directory / "proxy.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_offline(os.environ),
            cwd=directory,
        )
        try:
            wait_until(
                lambda: _healthy(process, f"http://127.0.0.1:{port}/readyz", directory / "proxy.log"),
                "the proxy is up",
                START_TIMEOUT_S,
                interval_s=0.5,
            )
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(timeout=60)
    assert code == 0, (directory / "proxy.log").read_text()[-2000:]


@contextmanager
def run_node(role: str, directory: Path, *flags: str) -> Iterator[Node]:
    """One more node of the kind that `lockstep up` starts; the test may kill it."""
    port, http_port, side_channel_port = free_port(), free_port(), free_port()
    command = [str(Path(sys.executable).with_name("lockstep")), role, str(PICO), "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--http-port", str(http_port)]
    command += ["--side-channel-host", "127.0.0.1", "--side-channel-port", str(side_channel_port)]
    command += ["--speculative-config", SPECULATIVE, "--kv-cache-memory-bytes", str(512 * 2**20), *flags]
    log = directory / f"{role}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=_offline(os.environ), cwd=directory
        )
        url = f"http://127.0.0.1:{http_port}"
        try:
            wait_until(
                lambda: _healthy(process, f"{url}/readyz", log),
                f"the {role} node is up",
                START_TIMEOUT_S,
                0.5,
            )
            yield Node(role, process.pid, url, f"127.0.0.1:{port}")
        finally:
            alive = process.poll() is None
            process.send_signal(signal.SIGTERM)
            code = process.wait(timeout=60)
    assert code == 0 or not alive, log.read_text()[-2000:]


@dataclass(frozen=True)
class VLLMServer:
    """A plain vLLM server that was started."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait_up(self, what: str) -> None:
        """Until it is healthy; fails with the end of its log if it is not in time or ends before."""
        wait_until(
            lambda: _healthy(self.process, f"{self.url}/health", self.log),
            what,
            START_TIMEOUT_S,
            interval_s=1.0,
        )


@contextmanager
def start_vllm(log: Path, *flags: str, env: Mapping[str, str] = MappingProxyType({})) -> Iterator[VLLMServer]:
    """Plain vLLM with the model, dtype and K of our stacks; what else it gets is in `flags` and `env`."""
    port = free_port()
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(PICO)]
    command += ["--served-model-name", "pico", "--dtype", "float32", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--speculative-config", SPECULATIVE, *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_reference_environment(os.environ) | env,
            start_new_session=True,
            cwd=log.parent,
        )
        try:
            yield VLLMServer(f"http://127.0.0.1:{port}", process, log)
        except AssertionError:
            sys.stderr.write(log.read_text()[-3000:])
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def run_reference(directory: Path, *flags: str) -> Iterator[str]:
    """A plain vLLM server of the same model, dtype and K; yields its URL."""
    with start_vllm(directory / "reference.log", "--enforce-eager", *flags) as server:
        server.wait_up("the plain vLLM server is up")
        yield server.url


def _healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> bool:
    assert process.poll() is None, log.read_text()[-2000:]
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def _reference_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Plain vLLM: without our platform, on one thread as each of our ranks is."""
    kept = {name: value for name, value in environ.items() if not name.startswith("LOCKSTEP_")}
    threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return _offline(kept) | threads


def _offline(environ: Mapping[str, str]) -> dict[str, str]:
    """As `lockstep up` starts its processes."""
    return dict(environ) | {
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
