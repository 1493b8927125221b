"""Owns the shared memory that ranks on one host exchange rows through: layout, waiting, dead peers.

Each rank writes one segment and reads the others'. A segment is a counter, the number of the last operation
whose payload is complete, and two payload buffers used in turn. Operation n of a peer being there also proves
that the peer has finished reading operation n - 1, so that buffer is free for n + 1: nobody waits twice.
"""

import contextlib
import ctypes
import mmap
import os
import select
import threading
import time
import uuid
from typing import Self

HEADER_BYTES = 64
SHM_DIRECTORY = "/dev/shm"

SPINS = 64
YIELD_FOR_S = 0.002
MAX_SLEEP_S = 0.001
CHECK_PEERS_EVERY_S = 0.5

# vLLM's way to order stores before the counter for other processes (shm_broadcast.py, memory_fence): taking a
# lock is a full barrier, also on processors that reorder stores.
_fence = threading.Lock()


class Segment:
    """One rank's shared memory, mapped by every rank; unlinked once all have it, so nothing outlives them."""

    def __init__(self, path: str, buffer_bytes: int, create: bool) -> None:
        """Map the segment.

        Raises:
            OSError: the memory cannot be had (too little of it in /dev/shm, a name that exists).
        """
        self.path = path
        size = HEADER_BYTES + 2 * buffer_bytes
        fd = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        try:
            if create:
                # Reserve it now: touching a page that /dev/shm cannot hold would kill the process.
                os.posix_fallocate(fd, 0, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._counter = memoryview(self._map)[:8].cast("q")
        self._buffers = (base + HEADER_BYTES, base + HEADER_BYTES + buffer_bytes)

    @classmethod
    def create(cls, buffer_bytes: int) -> Self:
        return cls(f"{SHM_DIRECTORY}/lockstep-{uuid.uuid4().hex}", buffer_bytes, create=True)

    def unlink(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def buffer(self, operation: int) -> int:
        """Address of the payload of an operation."""
        return self._buffers[operation & 1]

    def publish(self, operation: int) -> None:
        """Say that the payload of this operation is complete."""
        with _fence:
            self._counter[0] = operation

    def reached(self, operation: int) -> bool:
        return self._counter[0] >= operation


class PeerWatch:
    """Tells whether a process on this host has ended, a zombie counting as ended."""

    def __init__(self, pids: dict[int, int]) -> None:
        """Watch the processes.

        Args:
            pids: process id of each peer rank.

        Raises:
            OSError: a process is gone, or the kernel has no pidfds.
        """
        self._rank_of_fd = {os.pidfd_open(pid): rank for rank, pid in pids.items()}
        self._poll = select.poll()
        for fd in self._rank_of_fd:
            self._poll.register(fd, select.POLLIN)

    def dead_ranks(self) -> list[int]:
        return sorted(self._rank_of_fd[fd] for fd, _ in self._poll.poll(0))


def wait_for(segment: Segment, operation: int, rank: int, watch: PeerWatch, timeout_s: float) -> None:
    """Wait until a peer's payload is there: spin for the common case, then yield the core, then sleep.

    Raises:
        RuntimeError: a peer of the group has died, so that the payload can never come.
        TimeoutError: no payload within `timeout_s`.
    """
    if not any(segment.reached(operation) for _ in range(SPINS)):
        _wait_slowly(segment, operation, rank, watch, timeout_s)
    with _fence:
        pass


def _wait_slowly(segment: Segment, operation: int, rank: int, watch: PeerWatch, timeout_s: float) -> None:
    started = time.monotonic()
    next_check = started + CHECK_PEERS_EVERY_S
    while not segment.reached(operation):
        now = time.monotonic()
        waited_s = now - started
        if waited_s < YIELD_FOR_S:
            # Gives up the GIL (CPython 3.11.1 on) and the core, should the peer share it.
            os.sched_yield()
            continue
        if now >= next_check:
            next_check = now + CHECK_PEERS_EVERY_S
            dead = watch.dead_ranks()
            # What a peer published before it died is still good.
            if dead and not segment.reached(operation):
                raise RuntimeError(
                    f"MoE exchange: rank {rank} cannot answer, ranks {dead} of the group have died"
                )
            if waited_s > timeout_s:
                raise TimeoutError(f"MoE exchange: no answer from rank {rank} within {timeout_s:g} s")
        time.sleep(min(MAX_SLEEP_S, waited_s / 20))
