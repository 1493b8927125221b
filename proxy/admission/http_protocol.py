"""uvicorn's HTTP protocol with a bound on what a client can make it keep, and for how long.

uvicorn waits for ever for the head of a first request, for the rest of a body, and for a client to read. A
client that does not go on is cut off here; to the app it has then disconnected, which frees its request.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from proxy.metrics import Refusal

_LEAST_BODY_BYTES = 16 * 1024
"""A body has to grow by so much in each stretch of time, or end."""

TOO_LARGE_HEAD = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """`stall_s`: how long a client may take for a request's head, and may leave what it is sent unread.

    `discarded_bytes`: what may come of a body after its request has been answered, so that a client that is
    still sending sees the answer. `stalled` is told why a client was cut off.
    """

    stall_s: float
    head_bytes: int
    discarded_bytes: int
    stalled: Callable[[Refusal], None]


class BoundedHttp(HttpToolsProtocol):
    """At most `head_bytes` and one read of a head, uvicorn's 64 KiB of a body, and 64 KiB and one message of
    an answer stay in memory for one connection; what the app keeps of a body is the app's."""

    def __init__(self, limits: ClientLimits, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._limits = limits
        self._head_bytes = 0
        self._in_head = True
        self._body_bytes = 0
        self._discarded_bytes = 0
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(Refusal.SLOW_HEAD, self._cut_off)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self._limits.head_bytes and not self.transport.is_closing():
            self._limits.stalled(Refusal.LARGE_HEAD)
            self.transport.write(TOO_LARGE_HEAD)
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._done("unsent")
        self._expect(Refusal.SLOW_HEAD, self._cut_off)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._body_bytes = self._discarded_bytes = 0
        self._done(Refusal.SLOW_HEAD)
        super().on_headers_complete()
        self._expect(Refusal.SLOW_BODY, self._look_at_body, 0)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self.cycle.response_complete:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > self._limits.discarded_bytes:
                self.transport.abort()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._done(Refusal.SLOW_BODY)
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect(Refusal.SLOW_READER, self._cut_off)

    def resume_writing(self) -> None:
        self._done(Refusal.SLOW_READER)
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Below the mark at which writing pauses, but a transport that closes waits for it to be read.
        if self.transport.get_write_buffer_size() and Refusal.SLOW_READER not in self._timers:
            self._expect("unsent", self._look_at_unsent)

    def _expect(self, what: str, otherwise: Callable[..., None], *args: Any) -> None:
        """Unless `_done` comes in time."""
        self._done(what)
        self._timers[what] = self.loop.call_later(self._limits.stall_s, otherwise, *(args or (what,)))

    def _done(self, what: str) -> None:
        timer = self._timers.pop(what, None)
        if timer is not None:
            timer.cancel()

    def _look_at_body(self, seen_bytes: int) -> None:
        grown = self._body_bytes - seen_bytes >= _LEAST_BODY_BYTES
        # Where we do not read, it is not the client who is slow.
        if grown or self.flow.read_paused or len(self.cycle.body) > HIGH_WATER_LIMIT:
            self._expect(Refusal.SLOW_BODY, self._look_at_body, self._body_bytes)
        else:
            self._cut_off(Refusal.SLOW_BODY)

    def _look_at_unsent(self, _: str) -> None:
        if self.transport.get_write_buffer_size():
            self._cut_off(Refusal.SLOW_READER)

    def _cut_off(self, why: Refusal) -> None:
        self._limits.stalled(why)
        self.transport.abort()
