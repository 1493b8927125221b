"""Reads the KV events of one engine core as its scheduler publishes them; runs inside it.

vLLM's events do not say what is cached: a hash is stored again with each reuse, and removed with each of its
copies (v1/core/block_pool.py). They say which hashes to look up, and the pool says what there is.
"""

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisher,
)
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.kv_cache_interface import FullAttentionSpec

from lockstep.node.kv_events import KEY_BYTES

_ATTRIBUTE = "_lockstep_kv_tap"

Answer = dict[str, Any]
"""`number`, `snapshot`, `stored` and `removed` as in the protocol's KVBlocks."""


class KVEventTap(EventPublisher):
    """Put before the scheduler's own publisher, which gets every batch as before.

    Used on the engine's own thread only. One reader takes the answers, in order; an answer that it did not
    get is noticed by its number at the next call.
    """

    def __init__(self, publisher: EventPublisher, pool: Any, group_id: int) -> None:
        super().__init__()
        self._publisher = publisher
        self._pool = pool
        self._group_id = group_id
        self._cached = self._all_cached()
        self._touched: set[bytes] = set()
        self._cleared = False
        self._number = 0
        self._reader: Future[Answer] | None = None
        self.told_after_steps = False
        """Somebody calls `tell` once the outputs of a step are out, so that clients' tokens go first."""

    def publish(self, events: EventBatch) -> None:
        """Called with what a step brought, if it brought anything, before its outputs are out."""
        self._publisher.publish(events)
        self._note(events.events)
        if not self.told_after_steps:
            self.tell()

    def tell(self) -> None:
        """Answer the reader that waits, if there is something to say."""
        if self._reader is not None and (changes := self._changes()) is not None:
            reader, self._reader = self._reader, None
            reader.set_result(changes)

    def shutdown(self) -> None:
        self._publisher.shutdown()

    def get_publisher_config(self) -> Any:
        return self._publisher.get_publisher_config()

    def next_changes(self, seen: int) -> Answer | Future[Answer]:
        """What has changed since answer `seen`, as soon as anything has; a snapshot after another answer."""
        if self._reader is not None:
            self._reader.set_result(self._answer(snapshot=False))  # nobody waits for it any more
            self._reader = None
        if seen != self._number:
            self._touched.clear()
            self._cleared = True
        changes = self._changes()
        if changes is not None:
            return changes
        self._reader = Future()
        return self._reader

    def _note(self, events: Iterable[Any]) -> None:
        """More hashes than blocks between two answers: a snapshot is the shorter answer then."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._cleared = True
            elif isinstance(event, BlockStored) and event.group_idx == self._group_id:
                self._touched.update(h for h in event.block_hashes if h not in self._cached)
            elif isinstance(event, BlockRemoved) and event.group_idx == self._group_id:
                self._touched.update(event.block_hashes)
        if len(self._touched) > self._pool.num_gpu_blocks:
            self._cleared = True
        if self._cleared:
            self._touched.clear()

    def _changes(self) -> Answer | None:
        """None if there are none."""
        if self._cleared:
            self._cached, self._cleared = self._all_cached(), False
            return self._answer(snapshot=True, stored=self._cached)
        touched, self._touched = self._touched, set()
        there = {h for h in touched if self._pool.get_cached_block(h, [self._group_id]) is not None}
        stored, removed = there - self._cached, (touched - there) & self._cached
        if not stored and not removed:
            return None
        self._cached |= stored
        self._cached -= removed
        return self._answer(snapshot=False, stored=stored, removed=removed)

    def _answer(
        self, *, snapshot: bool, stored: Iterable[bytes] = (), removed: Iterable[bytes] = ()
    ) -> Answer:
        self._number += 1
        return {
            "number": self._number,
            "snapshot": snapshot,
            "stored": b"".join(h[-KEY_BYTES:] for h in stored),
            "removed": b"".join(h[-KEY_BYTES:] for h in removed),
        }

    def _all_cached(self) -> set[bytes]:
        keys = (block.block_hash for block in self._pool.blocks)
        return {
            get_block_hash(key) for key in keys if key is not None and get_group_id(key) == self._group_id
        }


def tap_of(scheduler: Any) -> KVEventTap | None:
    """The scheduler's, once somebody has asked for changes."""
    tap: KVEventTap | None = scheduler.__dict__.get(_ATTRIBUTE)
    return tap


def next_changes(engine_core: Any, seen: int) -> Any:
    """The utility: what `KVEventTap.next_changes` says of this engine core."""
    scheduler = engine_core.scheduler
    tap = tap_of(scheduler)
    if tap is None:
        pool = scheduler.kv_cache_manager.block_pool
        tap = KVEventTap(scheduler.kv_event_publisher, pool, _group_id(scheduler.kv_cache_config))
        scheduler.kv_event_publisher = tap
        setattr(scheduler, _ATTRIBUTE, tap)
    return tap.next_changes(seen)


def _group_id(kv_cache_config: Any) -> int:
    """Of several groups, one that keeps every block: one with a sliding window has only the last ones."""
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            return group_id
    return 0
