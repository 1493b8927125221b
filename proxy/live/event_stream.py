"""Sends a viewer's frames as server-sent events, with a heartbeat, and gives up on one who does not read."""

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from proxy.live.feed import Feed
from proxy.live.viewers import Viewer

HEARTBEAT_S = 10.0
"""After so long without a frame a comment is sent, so that all on the way see that the stream lives."""
SEND_TIMEOUT_S = 30.0
"""A viewer whose connection takes nothing for so long is dropped; until then it loses frames."""

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class EventStream(Response):
    """Runs until the viewer leaves, does not read, or the feed closes. `viewer` was opened by `feed`."""

    def __init__(self, feed: Feed, viewer: Viewer, send_timeout_s: float = SEND_TIMEOUT_S) -> None:
        super().__init__()
        self._feed = feed
        self._viewer = viewer
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leaving = asyncio.create_task(_disconnected(receive))
        sending = asyncio.create_task(self._send(send))
        try:
            await asyncio.wait((leaving, sending), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._feed.leave(self._viewer)
            for task in (leaving, sending):
                task.cancel()
            await asyncio.gather(leaving, sending, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        while (frame := await self._viewer.next(HEARTBEAT_S)) is not None:
            if lost := self._viewer.take_lost():
                frame = b"event: lost\ndata: %d\n\n%s" % (lost, frame)
            async with asyncio.timeout(self._send_timeout_s):
                await send(
                    {"type": "http.response.body", "body": frame or b": still here\n\n", "more_body": True}
                )
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
