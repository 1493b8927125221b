"""Makes the frames of the live page from what the proxy knows and the nodes answer, while somebody looks."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from lockstep.status import StatusDocument
from proxy.flow import Flow
from proxy.live.journal import ChoiceRow, choice_row
from proxy.live.viewers import Viewer, Viewers

logger = logging.getLogger(__name__)

TICK_S = 0.25
"""How often steps and requests that have changed are told."""
STATUS_INTERVAL_S = 1.0
"""How often the nodes are asked; they read their engines as often."""
MAX_REFRESHED = 40
"""Running requests, the oldest ones, whose token counts are told anew each second."""


@dataclass(frozen=True, slots=True)
class RequestRows:
    """`left_out`: more have changed than a frame holds."""

    rows: list[ChoiceRow]
    left_out: int = 0


class Feed:
    """One for all viewers: a frame is made and encoded once. Nodes are asked only while somebody looks."""

    def __init__(self, flow: Flow, status: Callable[[], Awaitable[StatusDocument]]) -> None:
        self._flow = flow
        self.status = status
        self.viewers = Viewers()

    def open(self) -> Viewer:
        """A viewer that first gets what is known already; raises UnavailableError as `Viewers.open`."""
        if not self.viewers.any.is_set():
            self._flow.lanes.take_new()
            self._flow.journal.watched = True
        viewer = self.viewers.open()
        viewer.put(_frame("steps", self._flow.lanes.all()))
        viewer.put(_frame("requests", RequestRows([*self._flow.journal.recent(), *self._running()])))
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """The viewer has gone."""
        self.viewers.leave(viewer)
        if not self.viewers.any.is_set():
            self._flow.journal.watched = False
            self._flow.journal.take_changed()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._repeat(self._tick, TICK_S), name="live changes")
            tasks.create_task(self._repeat(self._ask, STATUS_INTERVAL_S), name="live status")

    async def _repeat(self, make_frames: Callable[[], Awaitable[None]], interval_s: float) -> None:
        while True:
            await self.viewers.any.wait()
            try:
                await make_frames()
            except Exception:  # this task's supervisor: a page that fails must not take the proxy with it
                logger.exception("the live page missed a frame")
            await asyncio.sleep(interval_s)

    async def _tick(self) -> None:
        if steps := self._flow.lanes.take_new():
            self.viewers.send(_frame("steps", steps))
        rows, left_out = self._flow.journal.take_changed()
        if rows:
            self.viewers.send(_frame("requests", RequestRows(rows, left_out)))

    async def _ask(self) -> None:
        self.viewers.send(_frame("status", await self.status()))
        if running := self._running():
            self.viewers.send(_frame("requests", RequestRows(running)))

    def _running(self) -> list[ChoiceRow]:
        return [choice_row(flight) for flight in itertools.islice(self._flow.in_flight(), MAX_REFRESHED)]


def _frame(event: str, data: object) -> bytes:
    """A server-sent event; JSON has no line break outside of its strings, and there they are escaped."""
    return b"event: %s\ndata: %s\n\n" % (event.encode(), msgspec.json.encode(data))
