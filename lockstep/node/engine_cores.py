"""The seam between a node and what computes for it: vLLM's engine core processes, or a simulation of them."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest

from lockstep.node.config import NodeConfig
from lockstep.node.engine import Engine, RankStatus
from lockstep.node.facts import EngineFacts


class EngineCores(Protocol):
    """All ranks of one node; lockstep.node.engine.Engine says what each method does."""

    @property
    def global_ranks(self) -> list[int]: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def has_peers_elsewhere(self) -> bool: ...

    @property
    def dead(self) -> bool: ...

    async def add(self, request: EngineCoreRequest, local_rank: int) -> None: ...

    async def abort(self, request_ids: list[str]) -> None: ...

    async def abandon(self, request_ids: list[str]) -> None: ...

    async def announce(self, engine_ids: list[str]) -> None: ...

    async def next_outputs(self) -> EngineCoreOutputs: ...

    async def status(self) -> list[RankStatus]: ...

    async def facts(self) -> list[EngineFacts]: ...

    async def shutdown(self) -> None: ...


StartCores = Callable[[NodeConfig, VllmConfig], Awaitable[EngineCores]]


async def start_engine(config: NodeConfig, vllm_config: VllmConfig) -> EngineCores:
    """vLLM's engine cores, which need nothing of the node's own flags."""
    return await Engine.start(vllm_config)
