"""The engine cores of one node: vLLM's client to them, started, addressed by rank, and read at any time."""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

import psutil
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

from lockstep.errors import UnavailableError
from lockstep.node import ipc_folder
from lockstep.node.engine_status import (
    ABANDON_UTILITY,
    ANNOUNCE_UTILITY,
    FACTS_UTILITY,
    STATUS_UTILITY,
)
from lockstep.node.facts import EngineFacts
from lockstep.node.kv_events import EVENTS_UTILITY
from lockstep.node.parking import parks

logger = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 30.0
"""A step of a large prefill may be in the way of the answer."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What one engine core says of itself, between two steps."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    steps: list[list[Any]]
    steps_dropped: int
    kv: dict[str, Any]
    scheduler: dict[str, Any] = field(default_factory=dict)
    """What the decode scheduler counts, as `LockstepScheduler.lockstep_counters` says it; else empty."""


class Engine:
    """Owns the engine core processes of this node; lives until `shutdown`."""

    def __init__(self, vllm_config: VllmConfig, client: AsyncMPClient) -> None:
        self.vllm_config = vllm_config
        self._client = client
        self._parks = parks(vllm_config)
        self.global_ranks: list[int] = list(client.engine_ranks_managed)

    @classmethod
    async def start(cls, vllm_config: VllmConfig) -> "Engine":
        """Start the engine cores, in a thread so that /healthz answers meanwhile.

        vLLM bounds the wait by VLLM_ENGINE_READY_TIMEOUT_S. Raises RuntimeError or TimeoutError.
        """
        ipc_folder.make()
        executor = Executor.get_class(vllm_config)
        client = await asyncio.to_thread(
            EngineCoreClient.make_async_mp_client, vllm_config, executor, log_stats=True
        )
        return cls(vllm_config, client)

    @property
    def num_ranks(self) -> int:
        return len(self.global_ranks)

    @property
    def has_peers_elsewhere(self) -> bool:
        """Whether other nodes have ranks of this group."""
        return bool(self.vllm_config.parallel_config.data_parallel_size > self.num_ranks)

    @property
    def dead(self) -> bool:
        return bool(self._client.resources.engine_dead)

    async def add(self, request: EngineCoreRequest, local_rank: int) -> None:
        """Send a request to one rank; raises UnavailableError when the engines are gone.

        `data_parallel_rank` is an index into the client's own engines (vllm/v1/engine/core_client.py:1648).
        """
        request.data_parallel_rank = local_rank if self.num_ranks > 1 else None
        if self._parks:
            # Else the client has the other ranks enter a round (vllm/v1/engine/core_client.py:1590) that this
            # one is not in: it calls them itself once it has something to run.
            self._client.engines_running = True
        try:
            await self._client.add_request_async(request)
        except EngineDeadError as error:
            raise UnavailableError("the engines of this node are gone") from error

    async def abort(self, request_ids: list[str]) -> None:
        await self._client.abort_requests_async(request_ids)

    async def abandon(self, request_ids: list[str]) -> None:
        """Free what finished prefill legs still hold; ids that hold nothing are ignored."""
        if not self.dead:
            await self._client.call_utility_all_async(ABANDON_UTILITY, request_ids)

    async def announce(self, engine_ids: list[str]) -> None:
        """Have the connectors of all ranks send KV and notices to these decode engines only.

        Raises EngineDeadError, TimeoutError.
        """
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            await self._client.call_utility_all_async(ANNOUNCE_UTILITY, engine_ids)

    async def next_outputs(self) -> EngineCoreOutputs:
        """The next step of any rank. Raises EngineDeadError once an engine core is gone."""
        return await self._client.get_output_async()

    async def status(self) -> list[RankStatus]:
        """Read every rank; one entry per local rank. Raises EngineDeadError, TimeoutError."""
        if self.dead:
            raise EngineDeadError()
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            answers = await self._client.call_utility_all_async(STATUS_UTILITY)
        return [RankStatus(**answer) for answer in answers]

    async def kv_events(self, local_rank: int, seen: int) -> dict[str, Any]:
        """What the prefix cache of one rank has changed in since answer `seen`, as soon as it has.

        A caller that stops to wait asks again with the last answer that it had. Raises EngineDeadError.
        """
        engine = self._client.core_engines[local_rank]
        changes: dict[str, Any] = await self._client._call_utility_async(EVENTS_UTILITY, seen, engine=engine)
        return changes

    async def facts(self) -> list[EngineFacts]:
        """What each rank made of the configuration, by local rank. Raises EngineDeadError, TimeoutError."""
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            answers = await self._client.call_utility_all_async(FACTS_UTILITY)
        return [EngineFacts(**answer) for answer in answers]

    async def shutdown(self) -> None:
        """Stop the engine cores and whatever they started; they get vLLM's own shutdown time first."""
        # Python's resource tracker ends with this process, not before it.
        children = [
            child
            for child in psutil.Process().children(recursive=True)
            if not any("resource_tracker" in argument for argument in child.cmdline())
        ]
        await asyncio.to_thread(self._client.shutdown)
        await asyncio.to_thread(kill_survivors, children)


def kill_survivors(processes: list[psutil.Process], grace_s: float = 5.0) -> None:
    """Wait for processes that were asked to stop; kill those that have not after `grace_s`."""
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        logger.warning("process %d did not stop; killing it", process.pid)
        process.kill()
