"""Owns the choice of the core that a rank runs on: reading the list, choosing, pinning, unpinning."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

CORES_ENV = "LOCKSTEP_CPU_CORES"


def parse_cores(text: str) -> tuple[int, ...]:
    """Read a comma separated list of core ids, one for each local rank.

    Raises:
        ValueError: an entry is not a non-negative integer, is listed twice, or the list is empty.
    """
    cores: list[int] = []
    for entry in text.split(","):
        if not entry.strip().isdecimal():
            raise ValueError(
                f"{CORES_ENV}={text!r}: {entry.strip()!r} is not a core id (expected e.g. '0,1')"
            )
        core = int(entry)
        if core in cores:
            raise ValueError(f"{CORES_ENV}={text!r}: core {core} is listed twice; each rank needs its own")
        cores.append(core)
    return tuple(cores)


def core_for_rank(environ: Mapping[str, str], local_rank: int, allowed: set[int]) -> int | None:
    """The core of a local rank, or None when the node left ranks unpinned.

    Args:
        environ: where LOCKSTEP_CPU_CORES is read; unset or empty means unpinned.
        local_rank: index among all worker processes of this node, from 0.
        allowed: cores this process may run on.

    Raises:
        ValueError: the list is malformed, too short for this rank, or names a core outside `allowed`.
    """
    text = environ.get(CORES_ENV, "")
    if not text:
        return None
    cores = parse_cores(text)
    if local_rank >= len(cores):
        raise ValueError(
            f"{CORES_ENV}={text!r} names {len(cores)} cores, but local rank {local_rank} needs one"
        )
    core = cores[local_rank]
    if core not in allowed:
        raise ValueError(
            f"{CORES_ENV}={text!r}: core {core} is not one this process may use {sorted(allowed)}"
        )
    return core


def pin_thread(core: int) -> None:
    """Bind the calling thread, and every thread it starts from now on, to one core."""
    os.sched_setaffinity(0, {core})


@contextmanager
def threads_started_unpinned(original: set[int]) -> Iterator[None]:
    """Let threads started inside run on the `original` cores; afterwards the caller is bound as before."""
    pinned = os.sched_getaffinity(0)
    os.sched_setaffinity(0, original)
    try:
        yield
    finally:
        os.sched_setaffinity(0, pinned)
