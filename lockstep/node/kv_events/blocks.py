"""The node's copy of what its ranks have cached: follows the engines, tells proxies, greets late ones."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from vllm.v1.engine.exceptions import EngineDeadError

from lockstep.node.kv_events import KEY_BYTES
from lockstep.rpc.generated import lockstep_pb2 as pb

logger = logging.getLogger(__name__)

_GATHER_S = 0.02
"""Between two answers of a rank: what several steps change goes together."""

_ASK_ANEW_S = 60.0
_RETRY_S = 5.0

Send = Callable[[pb.NodeFrame], None]


@runtime_checkable
class TellsKVEvents(Protocol):
    """Engines that say what their prefix caches have; lockstep.node.engine.Engine does."""

    @property
    def num_ranks(self) -> int: ...

    async def kv_events(self, local_rank: int, seen: int) -> dict[str, Any]:
        """The changes after answer `seen`, or a snapshot; waits until there are any."""


@dataclass(slots=True)
class _Rank:
    number: int = 0
    """Of the last frame."""
    keys: set[bytes] = field(default_factory=set)


class KVBlocks:
    """All ranks by local rank, as of the last answer of each; empty on a node that tells nothing.

    No gap comes up between two frames of a session: a proxy that does not read is cut off, and begins anew.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}

    def greet(self, send: Send) -> None:
        """Tell a session that was just opened all there is."""
        for local_rank in self._ranks:
            self.resend(local_rank, send)

    def resend(self, local_rank: int, send: Send) -> None:
        """A snapshot for one proxy; nothing for a rank that tells nothing."""
        rank = self._ranks.get(local_rank)
        if rank is not None:
            send(_frame(local_rank, rank.number, snapshot=True, stored=b"".join(rank.keys)))

    def take(self, local_rank: int, answer: dict[str, Any], broadcast: Send) -> None:
        """Take over an answer of a rank's engine and tell all proxies."""
        rank = self._ranks.setdefault(local_rank, _Rank())
        if answer["snapshot"]:
            rank.keys.clear()
        elif not answer["stored"] and not answer["removed"]:
            return
        rank.keys.update(_keys(answer["stored"]))
        rank.keys.difference_update(_keys(answer["removed"]))
        rank.number += 1
        broadcast(
            _frame(
                local_rank,
                rank.number,
                snapshot=answer["snapshot"],
                stored=answer["stored"],
                removed=answer["removed"],
            )
        )

    async def follow(self, engine: TellsKVEvents, broadcast: Send) -> None:
        """Take over what the ranks say until cancelled, or until the engines are gone."""
        async with asyncio.TaskGroup() as ranks:
            for local_rank in range(engine.num_ranks):
                ranks.create_task(self._follow(engine, local_rank, broadcast))

    async def _follow(self, engine: TellsKVEvents, local_rank: int, broadcast: Send) -> None:
        seen = -1  # no answer has this number: the first is a snapshot
        while True:
            try:
                async with asyncio.timeout(_ASK_ANEW_S):
                    answer = await engine.kv_events(local_rank, seen)
            except TimeoutError:
                continue
            except EngineDeadError:
                return  # whoever hands out the engines' steps learns of it too
            except Exception:  # this task's supervisor: without events proxies route by what they last knew
                logger.exception("reading the KV events of rank %d failed", local_rank)
                await asyncio.sleep(_RETRY_S)
                continue
            seen = answer["number"]
            self.take(local_rank, answer, broadcast)
            await asyncio.sleep(_GATHER_S)


def _keys(packed: bytes) -> list[bytes]:
    return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]


def _frame(
    local_rank: int, number: int, *, snapshot: bool, stored: bytes, removed: bytes = b""
) -> pb.NodeFrame:
    return pb.NodeFrame(
        kv_blocks=pb.KVBlocks(
            rank=local_rank, number=number, snapshot=snapshot, stored=stored, removed=removed
        )
    )
