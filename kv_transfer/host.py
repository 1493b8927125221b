"""The engine thread's CPU affinity, which vLLM's NIXL worker overwrites on CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def keep_cpu_affinity() -> Iterator[None]:
    """Restore the calling thread's affinity on exit.

    On CPU, base_worker.py pins the constructing thread to the last core of each NUMA node, "reserved" for KV
    transfer. With a single-process executor that is the thread that runs the model: every engine on the
    machine would then compute on the same core.
    """
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
