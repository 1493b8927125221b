"""Decode's side of the simulated transfer: one connection to each prefill rank that KV is awaited from."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec

from lockstep.sim import wire
from lockstep.sim.rows import Peer, Row
from lockstep.sim.wire import Cancel, Pushed, Register, ToDecode, ToPrefill

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0

OnEnd = Callable[[str, str], None]
"""Request id, and why its KV will not come; "" once it is there."""


class Receives:
    """Of one decode node. Each registration ends once: by its KV, a refusal, a lost peer or its deadline."""

    def __init__(self, deadline_s: float, on_end: OnEnd) -> None:
        self._deadline_s = deadline_s
        self._on_end = on_end
        self._connections: dict[tuple[str, int], _Connection] = {}
        self._waiting: dict[str, tuple[tuple[str, int], asyncio.TimerHandle]] = {}

    def register(self, row: Row) -> None:
        """Ask for the KV of a row that has blocks."""
        peer = row.leg.peer
        if peer is None:
            raise ValueError(f"{row.request_id} is no decode leg")
        key = (peer.host, peer.port)
        timer = asyncio.get_running_loop().call_later(
            self._deadline_s, self._end, row.request_id, "registration deadline"
        )
        self._waiting[row.request_id] = (key, timer)
        self._connection(peer).send(Register(row.request_id, peer.engine_id, row.leg.token))

    def cancel(self, request_id: str) -> None:
        """The request has ended here; nothing is reported."""
        key, timer = self._waiting.pop(request_id, (None, None))
        if key is not None and timer is not None:
            timer.cancel()
            if key in self._connections:
                self._connections[key].send(Cancel(request_id))

    async def close(self) -> None:
        tasks = [connection.task for connection in self._connections.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _, timer in self._waiting.values():
            timer.cancel()

    def _connection(self, peer: Peer) -> "_Connection":
        key = (peer.host, peer.port)
        if key not in self._connections:
            self._connections[key] = _Connection(peer, self._take, lambda: self._lost(key))
        return self._connections[key]

    def _take(self, message: ToDecode) -> None:
        self._end(message.request_id, "" if isinstance(message, Pushed) else message.reason)

    def _lost(self, key: tuple[str, int]) -> None:
        self._connections.pop(key, None)
        for request_id in [rid for rid, (of, _) in self._waiting.items() if of == key]:
            self._end(request_id, "peer lost")

    def _end(self, request_id: str, failure: str) -> None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting[1].cancel()
            self._on_end(request_id, failure)


class _Connection:
    """Opens by itself; what is sent meanwhile waits. `lost` is called once, when it has ended."""

    def __init__(self, peer: Peer, take: Callable[[ToDecode], None], lost: Callable[[], None]) -> None:
        self._peer = peer
        self._take = take
        self._lost = lost
        self._unsent: list[ToPrefill] = []
        self._writer: asyncio.StreamWriter | None = None
        self.task = asyncio.create_task(self._run(), name=f"KV of {peer.host}:{peer.port}")

    def send(self, message: ToPrefill) -> None:
        if self._writer is None:
            self._unsent.append(message)
        else:
            wire.send(self._writer, message)

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(self._peer.host, self._peer.port)
        except (OSError, TimeoutError) as error:
            logger.warning("no connection to %s:%d: %s", self._peer.host, self._peer.port, error)
            self._lost()
            return
        with contextlib.closing(writer):
            for message in self._unsent:
                wire.send(writer, message)
            self._writer = writer
            try:
                async for answer in wire.received(reader, ToDecode):
                    self._take(answer)
            except (msgspec.MsgspecError, ValueError) as error:
                logger.warning("%s:%d sent something else: %s", self._peer.host, self._peer.port, error)
            finally:
                self._lost()
