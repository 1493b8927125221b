"""A client that takes little of the machine: streamed completions, parsed when they have ended."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

_END_OF_HEAD = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Event)


class StreamError(Exception):
    """An answer that is not whole, or no answer."""


class Stream(asyncio.Protocol):
    """One request on a connection of its own. Times are `time.monotonic`, 0 until it comes to them."""

    def __init__(self, request: bytes, stop_after_events: int | None = None) -> None:
        self._request = request
        self._stop_after_events = stop_after_events
        self.sent_s = 0.0
        self.first_event_s = 0.0
        self.last_event_s = 0.0
        self.num_reads = 0
        self.abandoned = False
        self.ended = asyncio.get_running_loop().create_future()
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass
        self.sent_s = time.monotonic()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        self._received += data
        self.num_reads += 1
        if b"data: " in data:
            self.last_event_s = time.monotonic()
            self.first_event_s = self.first_event_s or self.last_event_s
        if self._received.endswith(_LAST_CHUNK) and b"data: [DONE]" in self._received[-200:]:
            self._end()
        elif self._stop_after_events is not None and self.num_reads > self._stop_after_events:
            self.abandoned = True
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
        if self._transport is not None:
            self._transport.abort()

    def data(self) -> list[bytes]:
        """What came in each event of the answer. Raises StreamError for no stream, or half of one."""
        head, _, body = bytes(self._received).partition(_END_OF_HEAD)
        if not head.startswith(b"HTTP/1.1 200"):
            raise StreamError(f"{head[:80]!r} {body[:200]!r}")
        lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
        if self.abandoned:
            lines = lines[:-1]  # may be cut
        elif not lines or lines[-1] != b"[DONE]":
            raise StreamError(f"broke off after {len(lines)} events: {body[-200:]!r}")
        else:
            lines.pop()
        return lines

    def events(self) -> list[_Event]:
        """Of the whole answer. Raises StreamError as `data` does, and for one with an error."""
        events = [_decoder.decode(line) for line in self.data()]
        for event in events:
            if event.error is not None:
                raise StreamError(str(event.error))
        return events

    def text(self) -> str:
        """What the model has said."""
        return "".join(event.choices[0].text for event in self.events() if event.choices)


def completion(prompt: Sequence[int] | str, max_tokens: int, path: str = "/v1/completions") -> bytes:
    """A streamed request for exactly so many tokens, as it goes over the socket."""
    body = {"model": "pico", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    return post(body, path)


def post(body: Mapping[str, Any], path: str = "/v1/completions") -> bytes:
    """A streamed request as it goes over the socket."""
    data = json.dumps({**body, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data


async def stream(
    host: str, port: int, request: bytes, timeout_s: float, stop_after_events: int | None = None
) -> Stream:
    """Run one to its end; the answer is not looked at. Raises StreamError at the deadline, or OSError."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            transport, running = await loop.create_connection(
                lambda: Stream(request, stop_after_events), host, port
            )
            try:
                await running.ended
            finally:
                transport.abort()
    except TimeoutError:
        raise StreamError(f"no end within {timeout_s:g} s") from None
    return running
