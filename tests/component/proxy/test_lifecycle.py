"""The proxy's process: start, drain, memory, and no process left behind."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import psutil
import pytest
from component.proxy.fake_node import FakeNode, Wire
from component.proxy.stack import PICO, Stack, until

from lockstep import health
from proxy import arguments
from proxy.admission import entrance
from proxy.cluster import Cluster
from proxy.flow import Flow
from proxy.routing import Ranks
from proxy.security import key_source
from proxy.server import answering_health

ASK: dict[str, Any] = {"model": "pico", "prompt": "Some words to say.", "max_tokens": 30}
START_S = 120.0
MOST_RESIDENT_BYTES = 800 * 1024 * 1024


async def test_drain_lets_a_running_request_end_and_refuses_new_ones(stack: Stack) -> None:
    """Not ready at once; the running answer is whole."""
    stack.decode[0].set.pause_after_tokens = 3
    asking = asyncio.create_task(stack.http.post("/v1/completions", json=ASK))
    await until(lambda: stack.decode[0].running, "the request runs")
    draining = asyncio.create_task(stack.client.flow.drain(10))
    await until(lambda: stack.client.flow.draining, "draining begins")
    refused = await stack.http.post("/v1/completions", json=ASK)
    assert refused.status_code == 503
    assert (await stack.http.get("/readyz")).json()["reason"] == "draining"
    stack.decode[0].set.go.set()
    assert (await asking).json()["choices"][0]["text"] == ASK["prompt"]
    await draining


async def test_drain_aborts_what_does_not_end_by_the_deadline(stack: Stack) -> None:
    """The client is told, and both legs end."""
    stack.prefill[0].set.pause_after_tokens = 0
    asking = asyncio.create_task(stack.http.post("/v1/completions", json=ASK))
    await until(lambda: stack.prefill[0].running and stack.decode[0].running, "both legs run")
    await stack.client.flow.drain(0.1)
    assert (await asking).status_code == 503
    await until(lambda: not stack.prefill[0].running and not stack.decode[0].running, "both are aborted")


async def test_health_is_answered_before_there_is_a_pair() -> None:
    """An orchestrator sees a live proxy that is not ready, and why; the port then goes on listening."""
    with health.bind("127.0.0.1", 0, "--port") as sock:
        port = sock.getsockname()[1]
        config, args = arguments.load(["--prefill", "h:1", "--decode", "h:2"])
        flow = Flow(Cluster(["h:1"], ["h:2"]), Ranks(None), request_timeout_s=10, max_attempts=8)
        async with (
            answering_health(sock, entrance.build(config, args, key_source.take(config, args), flow)),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http,
        ):
            assert (await http.get("/healthz")).status_code == 200
            answer = await http.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["reason"] == flow.not_ready_because() != ""
        socket.create_connection(("127.0.0.1", port), timeout=5).close()


@contextlib.asynccontextmanager
async def process(*flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python -m proxy` as `lockstep proxy` starts it; killed if the test fails."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy", *flags, env={**os.environ}, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


@pytest.mark.timeout(240)
async def test_process_serves_and_stops_cleanly() -> None:
    """It answers, stays small (no engine, no weights), and SIGTERM ends it with status 0, leaving nothing."""
    wire = Wire()
    prefill, decode = FakeNode("prefill", wire, PICO), FakeNode("decode", wire, PICO)
    for node in (prefill, decode):
        await node.start()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    nodes = ["--prefill", prefill.address, "--decode", decode.address]
    flags = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "pico"]
    async with process(*nodes, *flags) as proxy:
        reading = asyncio.create_task(proxy.stderr.read())
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=START_S) as http:
            await _ready(http, proxy)
            answer = await http.post("/v1/completions", json=ASK)
        assert answer.json()["choices"][0]["text"] == ASK["prompt"]
        seen = psutil.Process(proxy.pid)
        children = seen.children(recursive=True)
        assert seen.memory_info().rss < MOST_RESIDENT_BYTES
        proxy.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(proxy.wait(), 30) == 0
        assert not [child for child in children if child.is_running()]
        log = (await reading).decode()
    assert "stop, key=- prompt_tokens=" in log
    assert "first_token_ms=" in log
    assert ASK["prompt"] not in log
    for node in (prefill, decode):
        await node.stop()


@pytest.mark.full
async def test_process_that_others_reach_asks_for_keys_or_does_not_start() -> None:
    """vLLM's default is every address. The last line says what to give."""
    async with process("--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:2") as proxy:
        _, log = await asyncio.wait_for(proxy.communicate(), START_S)
    assert proxy.returncode == 2
    assert log.decode().splitlines()[-1].startswith("lockstep proxy: --host: every address can be reached")


async def _ready(http: httpx.AsyncClient, proxy: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(START_S):
        while proxy.returncode is None:
            with contextlib.suppress(httpx.TransportError):
                if (await http.get("/readyz")).status_code == 200:
                    return
            await asyncio.sleep(0.1)
    raise AssertionError("the proxy ended before it was ready")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prefill", "nowhere", "--decode", "h:1"], "--prefill: Value error, 'nowhere' is not HOST:PORT"),
        (["--prefill", "h:1"], "--decode: nothing says where the decode nodes are"),
        (["--prefill", "h:1", "--decode", "h:2", "--max-model-len", "5"], "--max-model-len: the nodes say"),
    ],
)
def test_wrong_command_line_is_refused_by_flag(flags: list[str], message: str) -> None:
    """Before anything is connected."""
    from lockstep.errors import ConfigError
    from proxy import arguments

    with pytest.raises(ConfigError, match=message.replace("'", ".")):
        arguments.load(flags)
