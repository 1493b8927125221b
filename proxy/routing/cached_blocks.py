"""What the prefix cache of one rank has, as its node tells it: a snapshot, then each change."""

import struct
from collections.abc import Iterable

from lockstep.rpc.generated import lockstep_pb2 as pb

_MAX_BLOCKS = 1 << 22
"""Of a rank that does not say how many it has; each is some 60 bytes here."""


class CachedBlocks:
    """Keys of blocks. Exact as of the last frame, unless one was missed: then nothing, until a snapshot."""

    def __init__(self, num_kv_blocks: int) -> None:
        self.keys: set[int] = set()
        self.version = 0
        """Another one whenever `keys` may have changed."""
        self._most = num_kv_blocks or _MAX_BLOCKS
        self._number: int | None = None
        """Of the last frame; None while a snapshot is waited for."""

    def take(self, frame: pb.KVBlocks) -> bool:
        """Take a frame over; False if a snapshot has to be asked for, once for each gap."""
        self.version += 1
        if frame.snapshot:
            self.keys = set(_unpacked(frame.stored))
            self._number = frame.number
        elif self._number is None:
            return True  # asked already, and these changes are in the snapshot to come
        elif frame.number != self._number + 1:
            return self._lost()
        else:
            self._number = frame.number
            self.keys.difference_update(_unpacked(frame.removed))
            self.keys.update(_unpacked(frame.stored))
        if len(self.keys) > self._most:
            return self._lost()  # more than there can be: something was not told
        return True

    def _lost(self) -> bool:
        self.keys, self._number = set(), None
        return False


def _unpacked(packed: bytes) -> Iterable[int]:
    """The 8-byte keys, big-endian as vLLM cuts its hashes to integers (v1/core/kv_cache_utils.py:96)."""
    return struct.unpack(f">{len(packed) // 8}Q", packed)
