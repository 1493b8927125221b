"""Owns the queues of frames for those who look at the live page: bounded each, and limited in number."""

import asyncio
from collections import deque

from lockstep.errors import UnavailableError

MAX_VIEWERS = 16
MAX_QUEUED_FRAMES = 32
"""Some seconds' worth. A viewer that is further behind loses the oldest ones."""


class Viewer:
    """One open page. Never makes the sender wait, and never grows."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._more = asyncio.Event()
        self._closed = False
        self._lost = 0

    def put(self, frame: bytes) -> None:
        """Queue a frame; one too many takes the place of the oldest."""
        if len(self._frames) == MAX_QUEUED_FRAMES:
            self._frames.popleft()
            self._lost += 1
        self._frames.append(frame)
        self._more.set()

    def close(self) -> None:
        """Nothing more will come; what is queued is forgotten."""
        self._closed = True
        self._frames.clear()
        self._more.set()

    async def next(self, timeout_s: float) -> bytes | None:
        """The next frame, b"" if none came in time, None once it is closed."""
        if not self._frames and not self._closed:
            self._more.clear()
            try:
                await asyncio.wait_for(self._more.wait(), timeout_s)
            except TimeoutError:
                return b""
        if self._closed:
            return None
        return self._frames.popleft()

    def take_lost(self) -> int:
        """How many frames it has lost since the last call."""
        lost, self._lost = self._lost, 0
        return lost


class Viewers:
    """All open pages of this proxy; used from the event loop only."""

    def __init__(self) -> None:
        self._viewers: set[Viewer] = set()
        self._closed = False
        self.any = asyncio.Event()
        """Set while somebody looks."""

    def open(self) -> Viewer:
        """Raises UnavailableError when there are as many as may be, or when the proxy stops."""
        if self._closed or len(self._viewers) >= MAX_VIEWERS:
            raise UnavailableError(f"At most {MAX_VIEWERS} live pages can be open.")
        viewer = Viewer()
        self._viewers.add(viewer)
        self.any.set()
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """The page was closed."""
        self._viewers.discard(viewer)
        if not self._viewers:
            self.any.clear()

    def send(self, frame: bytes) -> None:
        """To everybody."""
        for viewer in self._viewers:
            viewer.put(frame)

    def close(self) -> None:
        """End all streams and open no more."""
        self._closed = True
        for viewer in self._viewers:
            viewer.close()
