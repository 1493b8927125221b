"""A decode group over two node processes of one rank each, as two hosts of vLLM's hybrid load balancing."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from system.harness import PICO, START_TIMEOUT_S, Node, free_port, wait_until
from system.processes import kill_all
from system.prompts import prompts
from system.servers import SPECULATIVE, run_node, run_proxy
from system.streams import Stream, stream_completion
from system.waiting import until

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

NOTICED_S = 5.0
ENDS_S = 60.0
"""A host whose peer has died ends by itself within this."""


@dataclass
class Group:
    """Two hosts, on ports that stay; each may be started again."""

    directory: Path
    rpc_port: int = field(default_factory=free_port)
    ports: list[tuple[int, int, int]] = field(
        default_factory=lambda: [(free_port(), free_port(), free_port()) for _ in range(2)]
    )
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def hosts(self) -> list[Node]:
        return [
            Node("decode", process.pid, f"http://127.0.0.1:{http_port}", f"127.0.0.1:{port}")
            for process, (port, http_port, _) in zip(self.processes, self.ports, strict=True)
        ]

    def start(self) -> None:
        """Both at once: neither is up before the other."""
        self.processes = [self._start(rank) for rank in range(2)]

    def wait_ready(self) -> None:
        for host, process in zip(self.hosts, self.processes, strict=True):
            wait_until(
                lambda h=host, p=process: _ready(h, p), "a host of the group is up", START_TIMEOUT_S, 0.5
            )

    def log(self, rank: int) -> str:
        return (self.directory / f"decode-{rank}.log").read_text()

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        port, http_port, side_channel_port = self.ports[rank]
        command = [str(Path(sys.executable).with_name("lockstep")), "decode", str(PICO), "--dtype", "float32"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--http-port", str(http_port)]
        command += ["--side-channel-host", "127.0.0.1", "--side-channel-port", str(side_channel_port)]
        command += ["--group-id", "two-hosts", "--speculative-config", SPECULATIVE]
        command += ["--kv-cache-memory-bytes", str(512 * 2**20), "--enable-expert-parallel"]
        command += [
            "--data-parallel-size",
            "2",
            "--data-parallel-size-local",
            "1",
            "--data-parallel-hybrid-lb",
        ]
        command += ["--data-parallel-start-rank", str(rank), "--data-parallel-address", "127.0.0.1"]
        command += ["--data-parallel-rpc-port", str(self.rpc_port)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        # On two hosts each would have a core 0 of its own.
        environment["LOCKSTEP_CPU_CORES"] = str(sorted(os.sched_getaffinity(0))[rank])
        with (self.directory / f"decode-{rank}.log").open("ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=self.directory
            )

    def stop(self) -> None:
        """Whatever is left of them."""
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    for child in psutil.Process(process.pid).children(recursive=True):
                        child.kill()
                process.kill()
                process.wait(timeout=30)


@dataclass(frozen=True)
class Cluster:
    group: Group
    prefill: Node
    url: str


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directories = [tmp_path_factory.mktemp(name) for name in ("group", "prefill", "proxy")]
    group = Group(directories[0])
    group.start()
    try:
        with run_node("prefill", directories[1]) as prefill:
            group.wait_ready()
            with run_proxy([prefill], group.hosts, directories[2]) as url:
                yield Cluster(group, prefill, url)
    finally:
        group.stop()


@pytest.fixture(autouse=True)
def nothing_left_over(cluster: Cluster) -> Iterator[None]:
    """In place of that of the shared stack: prefill holds no KV afterwards."""
    yield
    wait_until(
        lambda: not any(cluster.prefill.metric("lockstep_kv_cache_usage_ratio").values()),
        "prefill holds nothing",
        20.0,
    )


def _ready(node: Node, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, f"{node.grpc_address} ended with {process.poll()}"
    return node.ready()


def body(max_tokens: int, seed: int = 1) -> dict[str, Any]:
    (prompt,) = prompts([150], seed=seed)
    return {
        **{"model": "pico", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True},
        **{"temperature": 0, "return_token_ids": True},
    }


async def answers(cluster: Cluster, max_tokens: int = 48) -> list[list[int]]:
    """Of the same request to both ranks at once, with another one beside it on each."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
        streams = await asyncio.gather(
            *(
                stream_completion(client, body(max_tokens, seed), headers={"X-data-parallel-rank": rank})
                for seed in (1, 2)
                for rank in ("0", "1")
            )
        )
    assert all(stream.error is None and len(stream.token_ids) == max_tokens for stream in streams)
    return [stream.token_ids for stream in streams]


def steps_by_mode(host: Node) -> dict[str, float]:
    modes: dict[str, float] = {}
    for labels, value in host.metric("lockstep_decode_steps_total").items():
        mode = dict(labels)["mode"]
        modes[mode] = modes.get(mode, 0.0) + value
    return modes


async def test_both_hosts_run_full_graphs_together(cluster: Cluster) -> None:
    """One group with two ranks to the proxy: requests and KV reach both, all steps are FULL."""
    first, second, third, fourth = await answers(cluster)
    assert (first, third) == (second, fourth)

    def counted() -> bool:
        # 48 tokens are 16 steps of 1 + K at the least. Counts are read from the engines once a second.
        return all(
            host.by_rank("lockstep_kv_events_total").get(rank, 0) >= 2
            and sum(host.by_rank("lockstep_decode_steps_total").values()) >= 16
            for rank, host in ranks
        )

    ranks = list(zip("01", cluster.group.hosts, strict=True))
    await asyncio.to_thread(
        wait_until, counted, "the KV and the steps of two requests are counted on each", 10.0
    )
    for rank, host in ranks:
        assert host.by_rank("lockstep_decode_steps_total").keys() == {rank}
        modes = {mode: count for mode, count in steps_by_mode(host).items() if count}
        assert modes.keys() == {"FULL"}, modes


async def test_one_host_is_killed(cluster: Cluster) -> None:
    """The group is not used from then on, its streams end with an error, the other host ends by itself.

    Both are started again, and the proxy uses the group when all its ranks are there, not before.
    """
    expected = await answers(cluster)
    streams = [Stream(), Stream()]
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
        running = [
            asyncio.create_task(
                stream_completion(client, body(700), stream, {"X-data-parallel-rank": str(rank)})
            )
            for rank, stream in enumerate(streams)
        ]
        await until(lambda: min(len(s.token_ids) for s in streams) >= 30, "both streams run", timeout_s=60)
        kill_all(cluster.group.processes[1].pid)
        cluster.group.processes[1].wait(timeout=10)
        await asyncio.wait_for(asyncio.gather(*running), NOTICED_S)
        answer = await client.get("/readyz")
    for stream in streams:
        assert stream.error is not None
        assert stream.finish_reason is None
    assert answer.status_code == 503
    survivor = cluster.group.processes[0]
    await asyncio.to_thread(survivor.wait, ENDS_S)
    assert survivor.returncode != 0
    cluster.group.start()
    await asyncio.to_thread(cluster.group.wait_ready)
    await asyncio.to_thread(wait_until, lambda: _proxy_ready(cluster), "the proxy uses the group again", 30.0)
    assert await answers(cluster) == expected


async def test_hosts_are_drained_together(cluster: Cluster) -> None:
    """A stream on one of them runs to its end, and needs the other to step along; then both exit with 0."""
    hosts, stream = cluster.group.hosts, Stream()
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
        running = asyncio.create_task(
            stream_completion(client, body(600), stream, {"X-data-parallel-rank": "0"})
        )
        await until(lambda: len(stream.token_ids) >= 30, "it runs", timeout_s=60)
        command = [str(Path(sys.executable).with_name("lockstep")), "drain", "--timeout-s", "120"]
        drain = await asyncio.create_subprocess_exec(
            *command, *(host.grpc_address for host in hosts), stdout=asyncio.subprocess.PIPE
        )
        await running
        output, _ = await asyncio.wait_for(drain.communicate(), 60)
    said = output.decode()
    assert (len(stream.token_ids), stream.error, stream.finish_reason) == (600, None, "length")
    assert drain.returncode == 0, said
    for host in hosts:
        assert f"{host.grpc_address}: drained, it exits" in said
    assert f"{hosts[1].grpc_address}: waits for requests on other nodes of its group" in said
    for process in cluster.group.processes:
        assert await asyncio.to_thread(process.wait, ENDS_S) == 0


def _proxy_ready(cluster: Cluster) -> bool:
    return httpx.get(f"{cluster.url}/readyz", timeout=5).status_code == 200
