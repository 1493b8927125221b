"""What is written for one request, and in which order: one push's cursor, without clocks, threads or I/O.

Places of blocks are counted from the start of the request, in each KV cache group. The blocks of a streamed
group are written once they are computed, each to decode's block of the same place: the registration's
`start_blocks` says which place decode's first block has. Other groups, and groups whose block size differs
between the two sides, are written whole at the end, and vLLM pairs their blocks (base_worker.py
`_apply_prefix_caching`), which it can do for whole lists only.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.notices import Registration

BlockIds = tuple[tuple[int, ...], ...]
"""One list of block ids for each transferable KV cache group."""

_MAX_WRITES_IN_FLIGHT = 2
"""Of one request. What is computed meanwhile goes out together, so a slow link gets fewer, larger writes."""


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """How one KV cache group is pushed. `block_size` in tokens."""

    block_size: int
    streamed: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks that one engine step completed: the place of each group's first one, and the ids.

    `last`: with them the whole prompt is computed, the partly filled last block included.
    """

    start: tuple[int, ...]
    block_ids: BlockIds
    last: bool


@dataclass(frozen=True, slots=True)
class Span:
    """Blocks to write now: prefill's and decode's, group by group."""

    local: BlockIds
    remote: BlockIds


class PushPlan:
    """Mutable; belongs to `PrefillLedger`, from the request's first computed block until it is settled."""

    def __init__(self, token: str, layout: Sequence[GroupLayout]) -> None:
        self.token = token
        self.registration: Registration | None = None
        self.failure: str | None = None
        self.held = False
        """vLLM's scheduler has finished the request and waits for us before it frees the blocks."""
        self.complete = False
        """The whole prompt is computed."""
        self.ready_at: float | None = None
        """When the prompt was computed and decode had registered."""
        self.num_bytes = 0
        self.payload = b""
        """What goes to decode with the notice of completion."""
        self._layout = tuple(layout)
        self._blocks: list[list[int]] = [[] for _ in self._layout]
        self._cursor = [0] * len(self._layout)  # place up to which writes were given out
        self._writes: dict[int, bool] = {}  # number of a write: was it started
        self._stale: set[int] = set()  # started before the blocks were computed anew

    @property
    def busy(self) -> bool:
        """Whether a write may be in flight."""
        return bool(self._stale) or any(self._writes.values())

    @property
    def done(self) -> bool:
        """Whether everything that decode registered is written."""
        written = all(cursor >= len(have) for cursor, have in zip(self._cursor, self._blocks, strict=True))
        idle = not self._writes and not self._stale
        return self.complete and self.registration is not None and written and idle

    @property
    def mismatched(self) -> bool:
        """Whether decode's blocks cannot be those of this prompt."""
        registration = self.registration
        if registration is None:
            return False
        if len(registration.block_ids) != len(self._layout):
            return True
        for group, (have, wanted) in enumerate(zip(self._blocks, registration.block_ids, strict=True)):
            end = registration.start_blocks[group] + len(wanted)
            if self._aligned(group) and (len(have) > end or (self.complete and len(have) != end)):
                return True
        return False

    def extend(self, chunk: Chunk) -> None:
        """Take what a step computed. A chunk that does not follow the one before it is left to `finish`."""
        if list(chunk.start) != [len(have) for have in self._blocks]:
            return
        for have, new in zip(self._blocks, chunk.block_ids, strict=True):
            have.extend(new)
        self.complete = chunk.last

    def finish(self, block_ids: BlockIds) -> None:
        """The request has ended with these blocks. What lies behind the last chunk is not of the prompt."""
        pairs = list(zip(self._blocks, block_ids, strict=True))
        if any(list(final[: len(have)]) != have for have, final in pairs):
            self.restart()  # computed anew, unseen
        if not self.complete:
            self._blocks = [list(final) for final in block_ids]
            self.complete = True

    def restart(self) -> None:
        """The blocks were taken away (preemption). Nothing is written anew before old writes have ended."""
        self._stale |= {number for number, started in self._writes.items() if started}
        self._writes.clear()
        self._blocks = [[] for _ in self._layout]
        self._cursor = [0] * len(self._layout)
        self.complete = False
        self.ready_at = None

    def take(self, number: int) -> Span | None:
        """The next blocks to write, as write `number`; None if there is nothing to write now."""
        if self.registration is None or self.failure is not None or self._stale:
            return None
        if len(self._writes) >= _MAX_WRITES_IN_FLIGHT:
            return None
        pairs = [self._next(group, self.registration) for group in range(len(self._layout))]
        if not any(local for local, _ in pairs):
            return None
        self._writes[number] = False
        return Span(tuple(local for local, _ in pairs), tuple(remote for _, remote in pairs))

    def foreseen(self, chunk: Chunk, registration: Registration) -> Span | None:
        """What `take` will give, if nothing else happens, once the chunk is computed. Changes nothing."""
        plan = copy.copy(self)
        plan.registration = registration
        plan._blocks = [list(have) for have in self._blocks]
        plan._cursor, plan._writes = list(self._cursor), dict(self._writes)
        plan.extend(chunk)
        return None if plan.mismatched else plan.take(0)

    def wants(self, number: int) -> bool:
        """Whether the write may still be started."""
        return number in self._writes and self.failure is None

    def started(self, number: int) -> None:
        self._writes[number] = True

    def settled(self, number: int) -> bool:
        """The write is no longer in flight. False if its outcome does not matter any more."""
        self._stale.discard(number)
        return self._writes.pop(number, None) is not None

    def drop_unstarted(self) -> None:
        self._writes = {number: True for number, started in self._writes.items() if started}

    def _aligned(self, group: int) -> bool:
        """Whether blocks of the same place pair up, so that each can go alone."""
        layout = self._layout[group]
        assert self.registration is not None
        return layout.streamed and self.registration.block_sizes[group] == layout.block_size

    def _next(self, group: int, registration: Registration) -> tuple[tuple[int, ...], tuple[int, ...]]:
        have, wanted = self._blocks[group], registration.block_ids[group]
        if not self._aligned(group):
            if not self.complete or self._cursor[group]:
                return (), ()
            self._cursor[group] = len(have)
            return (tuple(have), wanted) if wanted else ((), ())
        first = registration.start_blocks[group]
        low, high = max(self._cursor[group], first), len(have)
        self._cursor[group] = high
        return tuple(have[low:high]), wanted[max(low - first, 0) : max(high - first, 0)]
