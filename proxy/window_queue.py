"""Holds requests back until a prefill rank is below its window: first in, first out, in two lanes."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from lockstep.errors import LockstepError

T = TypeVar("T")


class WindowQueue(Generic[T]):
    """Strictly in order: a large prompt at the head is never overtaken by a later one of its lane.

    The lane ahead is for requests that were sent before and have to be sent again.

    `send` takes a request if there is room and returns whether it did; it raises LockstepError when the
    request cannot be served at all, and `fail` then gets both. Decode blocks never wait for a long prefill
    queue, because a request is sent to both sides at once and only from here (docs/architecture.md, "Life of
    a request").
    """

    def __init__(self, send: Callable[[T], bool], fail: Callable[[T, LockstepError], None]) -> None:
        self._send = send
        self._fail = fail
        self._ahead: OrderedDict[int, T] = OrderedDict()
        self._waiting: OrderedDict[int, T] = OrderedDict()
        self._pumping = False

    def __len__(self) -> int:
        return len(self._ahead) + len(self._waiting)

    def put(self, item: T, ahead: bool = False) -> None:
        """Append a request to its lane and send what can be sent."""
        (self._ahead if ahead else self._waiting)[id(item)] = item
        self.pump()

    def discard(self, item: T) -> None:
        """Forget a request that is no longer wanted, if it is waiting. Pump afterwards."""
        for lane in (self._ahead, self._waiting):
            lane.pop(id(item), None)

    def pump(self) -> None:
        """Send from the head until one has to wait; call it whenever room may have come up.

        Calls from within `send` and `fail` return at once: the outer one goes on.
        """
        if self._pumping:
            return
        self._pumping = True
        try:
            while len(self) and self._send_head():
                pass
        finally:
            self._pumping = False

    def _send_head(self) -> bool:
        lane = self._ahead or self._waiting
        key, item = next(iter(lane.items()))
        try:
            if not self._send(item):
                return False
        except LockstepError as error:
            lane.pop(key, None)
            self._fail(item, error)
        else:
            lane.pop(key, None)
        return True
