"""Owns what follows when a rank stands still: its group is suspect, and its streams move where they can."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

from proxy.attempt import Attempt, Phase
from proxy.cluster import Cluster
from proxy.in_flight import InFlight
from proxy.moves import move_away
from proxy.step_watch import StepWatch

logger = logging.getLogger(__name__)

_CHECKS = 10
"""In the time after which a rank counts as frozen."""


class Suspicion:
    """A frozen rank blocks its peers in the collectives, so its whole group is suspect.

    Only the node itself can tell that its engine has died; it does so within half a minute (its step
    watchdog), and that is long for somebody who reads along.
    """

    def __init__(self, cluster: Cluster, in_flight: InFlight, frozen_after_s: float) -> None:
        self.steps = StepWatch(frozen_after_s)
        self._cluster = cluster
        self._in_flight = in_flight
        self._interval_s = frozen_after_s / _CHECKS
        self._suspects: set[str] = set()

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Check again and again."""

        async def watch() -> None:
            while True:
                await asyncio.sleep(self._interval_s)
                try:
                    self.check(time.monotonic())
                except Exception:  # this task's supervisor: one fault must not end the watch
                    logger.exception("looking for frozen ranks failed")

        task = asyncio.create_task(watch(), name="frozen ranks")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def check(self, now_s: float) -> None:
        """Look at all ranks."""
        streaming = {
            flight.attempt.decode.key
            for flight in self._in_flight
            if flight.attempt is not None and flight.attempt.phase is Phase.STREAMING
        }
        frozen = self.steps.frozen(streaming, now_s)
        suspects = dict(sorted(frozen))
        for address in self._suspects - suspects.keys():
            logger.info("%s steps again", address)
            self._cluster.suspect(address, "")
        for address, rank in suspects.items():
            if address not in self._suspects:
                logger.error(
                    "rank %d of %s has work and has made no step for %.1f s",
                    rank,
                    address,
                    frozen[address, rank],
                )
                self._cluster.suspect(address, "suspect: it has work and makes no step")
        self._suspects = set(suspects)
        if suspects:
            self._move_away(suspects)
        self._in_flight.pump()

    def _move_away(self, suspects: dict[str, int]) -> None:
        """A stream without another place to go to waits: its node may only be slow."""
        left = (member for address in suspects for member in self._cluster.group(address))
        move_away(self._cluster, self._in_flight, left, Attempt.on_loss)
