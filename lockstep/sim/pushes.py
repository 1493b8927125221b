"""Prefill's side of the simulated transfer: computed prompts and registrations, joined by id and token."""

import asyncio
import logging
from collections.abc import Callable

import msgspec

from lockstep.sim import wire
from lockstep.sim.rows import Row
from lockstep.sim.wire import Cancel, Pushed, Refused, Register, ToDecode, ToPrefill

logger = logging.getLogger(__name__)

Answer = Callable[[ToDecode], None]


class Pushes:
    """Of one prefill rank. `release` gives a prompt's blocks back; all times are of the running loop."""

    def __init__(
        self, engine_id: str, lease_s: float, push_s: Callable[[int], float], release: Callable[[Row], None]
    ) -> None:
        self._engine_id = engine_id
        self._lease_s = lease_s
        self._push_s = push_s
        self._release = release
        self._computed: dict[str, Row] = {}
        self._registered: dict[str, tuple[Register, Answer]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """By request: the end of its push, or that of the lease while nobody has registered."""
        self.pushed_requests = 0
        self.pushed_blocks = 0
        self.leases_expired = 0

    @property
    def held(self) -> int:
        """Computed prompts whose KV is not on decode."""
        return len(self._computed)

    def computed(self, row: Row) -> None:
        """A prompt is whole; its blocks are held until it is pushed, given up, or its lease is over."""
        self._computed[row.request_id] = row
        self._timers[row.request_id] = _later(self._lease_s, self._expire, row.request_id)
        self._join(row.request_id)

    def give_up(self, request_id: str) -> None:
        """The request was aborted here, in whatever state it is."""
        self._forget(request_id)
        registered = self._registered.pop(request_id, None)
        if registered is not None:
            registered[1](Refused(request_id, "aborted"))

    def take(self, message: ToPrefill, answer: Answer) -> None:
        """A message of decode."""
        if isinstance(message, Cancel):
            self._registered.pop(message.request_id, None)
            self._forget(message.request_id)
        elif message.engine_id != self._engine_id:
            answer(Refused(message.request_id, "another engine"))
        else:
            self._registered[message.request_id] = (message, answer)
            self._join(message.request_id)

    def lost(self, answer: Answer) -> None:
        """A connection ended, and its registrations with it; computed prompts wait for their lease."""
        for request_id in [rid for rid, (_, owner) in self._registered.items() if owner is answer]:
            del self._registered[request_id]

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def _join(self, request_id: str) -> None:
        row, registered = self._computed.get(request_id), self._registered.get(request_id)
        if row is None or registered is None:
            return
        register, answer = registered
        if register.token != row.leg.token:
            del self._registered[request_id]
            answer(Refused(request_id, "another token"))
            return
        self._timers.pop(request_id).cancel()
        self._timers[request_id] = _later(self._push_s(len(row.tokens)), self._end_push, request_id)

    def _end_push(self, request_id: str) -> None:
        row = self._computed[request_id]
        self.pushed_requests += 1
        self.pushed_blocks += row.holding.blocks
        self._forget(request_id)
        registered = self._registered.pop(request_id, None)
        if registered is not None:
            registered[1](Pushed(request_id))

    def _expire(self, request_id: str) -> None:
        self.leases_expired += 1
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        timer = self._timers.pop(request_id, None)
        if timer is not None:
            timer.cancel()
        row = self._computed.pop(request_id, None)
        if row is not None:
            self._release(row)


async def serve(host: str, port: int, pushes: Pushes) -> asyncio.Server:
    """Listen where the rank's side channel is said to be."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def answer(message: ToDecode) -> None:
            wire.send(writer, message)

        try:
            async for message in wire.received(reader, ToPrefill):
                pushes.take(message, answer)
        except (msgspec.MsgspecError, ValueError) as error:
            logger.warning("a peer sent something else than a registration: %s", error)
        finally:
            pushes.lost(answer)
            writer.close()

    return await asyncio.start_server(connected, host, port)


def _later(delay_s: float, call: Callable[[str], None], request_id: str) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(delay_s, call, request_id)
