"""`lockstep proxy --workers 2` as processes, over fake nodes."""

import asyncio
import os
import signal
import socket
import sys

import httpx
import psutil
import pytest
from component.proxy.fake_node import FakeNode, Wire
from component.proxy.stack import PICO, until
from prometheus_client.parser import text_string_to_metric_families

ASK = {"model": "pico", "prompt": "Some words to say.", "max_tokens": 30}
START_S = 240.0
MOST_SUPERVISOR_BYTES = 100 * 1024 * 1024


class Workers:
    """The proxy's port, asked anew with each call: any worker may answer."""

    def __init__(self, url: str, supervisor: psutil.Process) -> None:
        self.url = url
        self.supervisor = supervisor

    async def get(self, path: str) -> httpx.Response | None:
        """None where nobody answers."""
        try:
            async with httpx.AsyncClient(base_url=self.url, timeout=10) as http:
                return await http.get(path)
        except httpx.TransportError:
            return None

    async def ask(self) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.url, timeout=START_S) as http:
            return await http.post("/v1/completions", json=ASK)

    async def serving(self) -> set[int]:
        """The numbers of the workers that answer, as they themselves say in a few answers."""
        answers = await asyncio.gather(*(self.get("/lockstep/status") for _ in range(8)))
        documents = [answer.json() for answer in answers if answer is not None and answer.status_code == 200]
        assert all(document["proxy"]["workers"] == 2 for document in documents)
        return {document["proxy"]["worker"] for document in documents}

    async def both_serve(self) -> None:
        seen: set[int] = set()
        async with asyncio.timeout(START_S):
            while seen != {1, 2}:
                seen |= await self.serving()
                await asyncio.sleep(0.1)

    async def total(self, name: str) -> float:
        """Of a metric, over its labels."""
        page = await self.get("/metrics")
        assert page is not None
        families = text_string_to_metric_families(page.text)
        return sum(s.value for family in families for s in family.samples if s.name == name)


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_one_port_two_workers() -> None:
    """Both answer; totals are of both; one is killed and the other serves on; it comes back; both stop."""
    wire = Wire()
    prefill, decode = FakeNode("prefill", wire, PICO), FakeNode("decode", wire, PICO)
    for node in (prefill, decode):
        await node.start()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "proxy", "--workers", "2", "--host", "127.0.0.1", "--port", str(port)),
        *("--prefill", prefill.address, "--decode", decode.address, "--served-model-name", "pico"),
        env={**os.environ},
        stderr=asyncio.subprocess.PIPE,
    )
    reading = asyncio.create_task(process.stderr.read())
    try:
        workers = Workers(f"http://127.0.0.1:{port}", psutil.Process(process.pid))
        await workers.both_serve()
        await until(lambda: len(decode.sessions) == 2, "each worker has a session of its own")
        for _ in range(6):
            assert (await workers.ask()).json()["choices"][0]["text"] == ASK["prompt"]
        assert await workers.total("lockstep_proxy_requests_total") == 6
        assert await workers.total("vllm:request_success_total") == 6
        assert await workers.total("lockstep_proxy_ready") == 1
        assert workers.supervisor.memory_info().rss < MOST_SUPERVISOR_BYTES

        before = workers.supervisor.children()
        before[0].kill()
        await until(lambda: len(decode.sessions) == 1, "one is gone")
        for _ in range(3):
            assert (await workers.ask()).status_code == 200
        assert await workers.total("lockstep_proxy_requests_total") == 9
        await workers.both_serve()
        assert before[0].pid not in [child.pid for child in workers.supervisor.children()]

        decode.set.pause_after_tokens = 3
        asking = asyncio.create_task(workers.ask())
        await until(lambda: decode.num_paused, "the request runs")
        process.send_signal(signal.SIGTERM)
        decode.set.go.set()
        assert (await asking).json()["choices"][0]["text"] == ASK["prompt"]
        children = workers.supervisor.children()
        assert await asyncio.wait_for(process.wait(), 30) == 0
        assert not [child for child in children if child.is_running()]
    finally:
        if process.returncode is None:
            process.kill()
        log = (await reading).decode()
        await process.wait()
        for node in (prefill, decode):
            await node.stop()
    assert "worker 1 of 2 serves" in log
    assert "role=proxy/2" in log
