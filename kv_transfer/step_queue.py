"""What an engine step tells the prefill ledger, held back until the device has computed what it speaks of."""

from collections import deque
from collections.abc import Callable


class StepQueue:
    """First in, first out, so that a preemption never overtakes the chunk that it takes back.

    Not thread-safe; the caller holds a lock.
    """

    def __init__(self) -> None:
        self._entries: deque[tuple[Callable[[], bool] | None, Callable[[], None]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._entries)

    def put(self, apply: Callable[[], None], computed: Callable[[], bool] | None = None) -> None:
        """Run `apply` once `computed` says so (at once if None) and everything before it has run."""
        self._entries.append((computed, apply))
        self.advance()

    def advance(self) -> None:
        """Run what is due."""
        while self._entries:
            computed, apply = self._entries[0]
            if computed is not None and not computed():
                return
            self._entries.popleft()
            apply()
