"""Ends attempts on nodes that will not see them through, so that others go on elsewhere without a break."""

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable

from lockstep.rpc.generated import lockstep_pb2 as pb
from proxy.attempt import Attempt
from proxy.cluster import Cluster
from proxy.in_flight import InFlight
from proxy.nodes import Role

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0

Leave = Callable[[Attempt, Role], None]
"""Sets the attempt's `end` if it still needs the side that is left."""


def move_away(cluster: Cluster, in_flight: InFlight, addresses: Iterable[str], leave: Leave) -> int:
    """Leave the nodes with all streams that have another place to go to; returns how many have moved.

    One whose client asked for its very rank stays.
    """
    left = set(addresses)
    spare_pair = functools.cache(functools.partial(cluster.spare_pair, left))
    moved = 0
    for flight in in_flight.all():
        live = flight.live()
        if not live or not spare_pair(flight.outlet.served):
            continue
        pinned = flight.request.data_parallel_rank is not None
        for attempt in live:
            if attempt.prefill.node.address in left:
                leave(attempt, "prefill")
            if attempt.decode.node.address in left and not pinned:
                leave(attempt, "decode")
        moved += live[0].end is not None
        in_flight.try_again(flight)
    return moved


class DrainMoves:
    """Moves the streams of nodes that drain, shortly before their deadline or as soon as the node says so.

    At the deadline the node itself gives back what it still has, all of it at once and as lost.
    """

    def __init__(self, cluster: Cluster, in_flight: InFlight, move_before_s: float) -> None:
        self._cluster = cluster
        self._in_flight = in_flight
        self._move_before_s = move_before_s
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def draining(self, address: str, drain: pb.Draining) -> None:
        """The node says that it drains, or says it anew with another deadline."""
        if drain.move:
            self._move(address)
        else:
            # A short drain has streams that end by themselves, too.
            self._later(address, max(drain.deadline_s - self._move_before_s, drain.deadline_s / 2))

    def gone(self, address: str) -> None:
        """Its session ended."""
        timer = self._timers.pop(address, None)
        if timer is not None:
            timer.cancel()

    def _later(self, address: str, wait_s: float) -> None:
        self.gone(address)
        self._timers[address] = asyncio.get_running_loop().call_later(wait_s, self._move, address)

    def _move(self, address: str) -> None:
        moved = move_away(self._cluster, self._in_flight, self._cluster.group(address), Attempt.on_drain)
        if moved:
            logger.info("%d stream(s) move away from %s, which drains", moved, address)
        self._later(address, _LOOK_AGAIN_S)  # another pair may come up
