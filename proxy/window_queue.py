"""Holds requests back until a prefill rank is below its window: first in, first out."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from lockstep.errors import LockstepError

T = TypeVar("T")


class WindowQueue(Generic[T]):
    """Strictly in order: a large prompt at the head is never overtaken, so none starves.

    `send` takes a request if there is room and returns whether it did; it raises LockstepError when the
    request cannot be served at all, and `fail` then gets both. Decode blocks never wait for a long prefill
    queue, because a request is sent to both sides at once and only from here (docs/architecture.md, "Life of
    a request").
    """

    def __init__(self, send: Callable[[T], bool], fail: Callable[[T, LockstepError], None]) -> None:
        self._send = send
        self._fail = fail
        self._waiting: OrderedDict[int, T] = OrderedDict()
        self._pumping = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, item: T) -> None:
        """Append a request and send what can be sent."""
        self._waiting[id(item)] = item
        self.pump()

    def discard(self, item: T) -> None:
        """Forget a request that is no longer wanted, if it is waiting. Pump afterwards."""
        self._waiting.pop(id(item), None)

    def pump(self) -> None:
        """Send from the head until one has to wait; call it whenever room may have come up.

        Calls from within `send` and `fail` return at once: the outer one goes on.
        """
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._waiting and self._send_head():
                pass
        finally:
            self._pumping = False

    def _send_head(self) -> bool:
        key, item = next(iter(self._waiting.items()))
        try:
            if not self._send(item):
                return False
        except LockstepError as error:
            self._waiting.pop(key, None)
            self._fail(item, error)
        else:
            self._waiting.pop(key, None)
        return True
