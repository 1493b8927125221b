"""Holds requests back until a prefill rank is below its window: by priority, then first in, first out."""

import bisect
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from lockstep.errors import LockstepError

T = TypeVar("T")


class WindowQueue(Generic[T]):
    """Strictly in order: a large prompt at the head is never overtaken by a later one of its lane.

    Each priority has a lane, the lowest number goes first, as in vLLM. The lane ahead of them all is for
    requests that were sent before and have to be sent again.

    `send` takes a request if there is room and returns whether it did; it raises LockstepError when the
    request cannot be served at all, and `fail` then gets both. Decode blocks never wait for a long prefill
    queue, because a request is sent to both sides at once and only from here (docs/architecture.md, "Life of
    a request").
    """

    def __init__(self, send: Callable[[T], bool], fail: Callable[[T, LockstepError], None]) -> None:
        self._send = send
        self._fail = fail
        self._ahead: OrderedDict[int, T] = OrderedDict()
        self._lanes: dict[int, OrderedDict[int, T]] = {}
        self._priorities: list[int] = []
        """Those that have a lane, in order; a lane is never empty."""
        self._priority_of: dict[int, int] = {}
        self._pumping = False

    def __len__(self) -> int:
        return len(self._ahead) + len(self._priority_of)

    def put(self, item: T, priority: int = 0, ahead: bool = False) -> None:
        """Append a request to its lane and send what can be sent."""
        self._append(item, priority, ahead)
        self.pump()

    def discard(self, item: T) -> None:
        """Forget a request that is no longer wanted, if it is waiting. Pump afterwards."""
        self._ahead.pop(id(item), None)
        priority = self._priority_of.pop(id(item), None)
        if priority is None:
            return
        lane = self._lanes[priority]
        del lane[id(item)]
        if not lane:
            del self._lanes[priority]
            self._priorities.remove(priority)

    def head(self) -> T | None:
        """The request that is sent next."""
        lane = self._ahead or (self._lanes[self._priorities[0]] if self._priorities else None)
        return next(iter(lane.values())) if lane else None

    def last_below(self, priority: int) -> T | None:
        """Of the requests with a worse priority than this, the one that would be sent last."""
        if not self._priorities or self._priorities[-1] <= priority:
            return None
        return next(reversed(self._lanes[self._priorities[-1]].values()))

    def pump(self) -> None:
        """Send from the head until one has to wait; call it whenever room may have come up.

        Calls from within `send` and `fail` return at once: the outer one goes on.
        """
        if self._pumping:
            return
        self._pumping = True
        try:
            while (item := self.head()) is not None and self._send_head(item):
                pass
        finally:
            self._pumping = False

    def _append(self, item: T, priority: int, ahead: bool) -> None:
        if ahead:
            self._ahead[id(item)] = item
            return
        if priority not in self._lanes:
            self._lanes[priority] = OrderedDict()
            bisect.insort(self._priorities, priority)
        self._lanes[priority][id(item)] = item
        self._priority_of[id(item)] = priority

    def _send_head(self, item: T) -> bool:
        ahead = id(item) in self._ahead
        priority = self._priority_of.get(id(item), 0)
        # It is out of its lane while it is sent: a node can refuse it at once, and then it is put here anew.
        self.discard(item)
        try:
            if self._send(item):
                return True
        except LockstepError as error:
            self._fail(item, error)
            return True
        self._append(item, priority, ahead)
        lane = self._ahead if ahead else self._lanes[priority]
        lane.move_to_end(id(item), last=False)
        return False
