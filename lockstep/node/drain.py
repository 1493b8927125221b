"""Owns how a node drains: asked for by a signal or over gRPC, until nothing is left or the deadline."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable

from lockstep.errors import NodeLostError
from lockstep.node.sessions import SessionRegistry
from lockstep.rpc.generated import lockstep_pb2 as pb

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_PROGRESS_S = 1.0
_WRITE_S = 0.2
"""Lets the sessions write what was queued."""

WaitsFor = Callable[[float], str]
"""What the node must not exit before, though no request has run on it since a time; empty for nothing."""


class Drain:
    """One way, and once: a node that drains exits. Used from the event loop only."""

    def __init__(self, timeout_s: float, registry: SessionRegistry) -> None:
        self.requested = asyncio.Event()
        self._timeout_s = timeout_s
        self._done = asyncio.Event()
        self._deadline_s = 0.0
        self._registry = registry
        self._waits_for = ""
        self._move = False
        self._told: tuple[float, bool] | None = None
        """The deadline that proxies know, and whether they are to move streams at once."""
        self._num_moved = 0

    def ask(self, timeout_s: float | None = None, move: bool = False) -> None:
        """Begin to drain. With a time, also while the node drains: it counts from now.

        `move`: the running requests go on on other nodes at once, where there are any.
        """
        self._move |= move
        if timeout_s is not None or not self.requested.is_set():
            self._timeout_s = self._timeout_s if timeout_s is None else timeout_s
            self._deadline_s = time.monotonic() + self._timeout_s
        self.requested.set()

    async def run(self, ended: "asyncio.Task[None]", waits_for: WaitsFor) -> None:
        """Tell the proxies, wait, and give back what has not ended in time; to be called once.

        `ended` is the task that hands out the engines' steps: without engines there is nothing to wait for.
        """
        self.ask()
        registry = self._registry
        logger.info("draining %d request(s) for at most %g s", registry.num_requests, self._timeout_s)
        while not ended.done() and time.monotonic() < self._deadline_s:
            self._tell()
            self._waits_for = "" if registry.num_requests else waits_for(registry.empty_since_s)
            if not registry.num_requests and not self._waits_for:
                break
            await asyncio.sleep(_POLL_S)
        self._tell()
        self._num_moved = registry.num_requests
        if self._num_moved:
            logger.warning("%d request(s) were still running", self._num_moved)
            registry.fail_all(NodeLostError("the node that held the request shut down"))
            await asyncio.sleep(_WRITE_S)
        elif self._waits_for:
            logger.warning("did not wait any longer for %s", self._waits_for)
        self.finish()

    def _tell(self) -> None:
        """Say when it will be over, to those that were told otherwise."""
        if self._told != (self._deadline_s, self._move):
            self._told = self._deadline_s, self._move
            left_s = max(0.0, self._deadline_s - time.monotonic())
            frame = pb.Draining(deadline_s=left_s, move=self._move)
            self._registry.broadcast(pb.NodeFrame(draining=frame))

    def finish(self) -> None:
        """The node is about to exit, whether it drained or not."""
        self._done.set()

    async def progress(self) -> AsyncIterator[pb.DrainProgress]:
        """Once a second, and at the end."""
        while not self._done.is_set():
            yield pb.DrainProgress(
                num_requests=self._registry.num_requests,
                left_s=max(0.0, self._deadline_s - time.monotonic()),
                waits_for=self._waits_for,
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._done.wait(), _PROGRESS_S)
        yield pb.DrainProgress(done=True, num_moved=self._num_moved)
