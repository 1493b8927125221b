"""A node whose KV pool is mostly in quarantine, over its real ports; its engine is stood in for."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from component.node.test_server import DEADLINE_S, until
from vllm.v1.engine import EngineCoreOutputs

from lockstep.errors import UnavailableError
from lockstep.node.config import NodeConfig
from lockstep.node.engine import RankStatus
from lockstep.node.quarantine import QuarantineWatch
from lockstep.node.runtime import Node
from lockstep.node.sessions import ProxySession
from prefill_node.service import ROLE

REQUEST = "ls-1-0-a1"


class EngineCores:
    """Stands for one engine process with 100 KV blocks; it has no output."""

    num_ranks, dead, global_ranks = 1, False, (0,)
    has_peers_elsewhere = False

    def __init__(self) -> None:
        self.quarantined_blocks = 0
        self.answers = True
        self.asked_in_vain = False
        self.stopped = False

    async def status(self) -> list[RankStatus]:
        if not self.answers:
            self.asked_in_vain = True
            raise TimeoutError
        return [RankStatus(0, 0, 0.0, [], 0, {"quarantined_blocks": self.quarantined_blocks})]

    async def next_outputs(self) -> EngineCoreOutputs:
        await asyncio.Event().wait()
        raise AssertionError

    async def shutdown(self) -> None:
        self.stopped = True


class StartedNode(Node):
    """Its engines are there already."""

    def __init__(self, config: NodeConfig, cores: EngineCores) -> None:
        super().__init__(ROLE, config)
        self.quarantine = QuarantineWatch(0.5, patience_s=0.0)
        self.telemetry._quarantine = self.quarantine
        self.cores: Any = cores

    async def _start_engine(self, args: Any) -> Any:
        self.quarantine.set_pools([100])
        self.engine = self.cores
        return self.cores


@pytest.fixture
def node(unused_tcp_port_factory: Callable[[], int]) -> StartedNode:
    config = NodeConfig(
        host="127.0.0.1",
        port=unused_tcp_port_factory(),
        http_port=unused_tcp_port_factory(),
        drain_timeout_s=DEADLINE_S,
    )
    return StartedNode(config, EngineCores())


async def start_with_a_request(node: StartedNode) -> tuple["asyncio.Task[None]", ProxySession]:
    running = asyncio.create_task(node.run(None))  # type: ignore[arg-type]
    await until(lambda: node.ready)
    session = ProxySession("p1")
    node.registry.open(session)
    node.registry.claim(REQUEST, session)
    return running, session


async def test_node_drains_and_ends_with_an_error(node: StartedNode) -> None:
    """Not ready at once, its running request comes to its end, then an error that main makes status 1 of."""
    running, session = await start_with_a_request(node)
    node.cores.quarantined_blocks = 51
    await until(lambda: not node.ready)
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{node.config.http_port}/readyz")
    assert (answer.status_code, answer.json()["reason"]) == (503, "draining")
    assert node.draining
    assert not running.done()
    node.registry.release([REQUEST], session)
    with pytest.raises(UnavailableError, match="51 of 100 KV blocks"):
        await asyncio.wait_for(running, DEADLINE_S)
    assert node.cores.stopped


async def test_node_that_is_told_to_stop_ends_well_whatever_its_engines_do(node: StartedNode) -> None:
    """They may be gone before it has drained: a terminal interrupts all processes at once."""
    running, session = await start_with_a_request(node)
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: node.draining)
    node.cores.answers = False
    await until(lambda: node.cores.asked_in_vain)
    node.registry.release([REQUEST], session)
    await asyncio.wait_for(running, DEADLINE_S)
    assert node.cores.stopped
