"""Writes the gauges down once a second, where another process reads them: no scrape asks this one."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable

from proxy.workers.supervisor import MULTIPROC_DIR

_INTERVAL_S = 1.0


@contextlib.asynccontextmanager
async def written(refresh: Callable[[], None]) -> AsyncIterator[None]:
    """Call `refresh` from time to time while in the block, if metrics go by files."""
    if MULTIPROC_DIR not in os.environ:
        yield
        return

    async def write() -> None:
        while True:
            refresh()
            await asyncio.sleep(_INTERVAL_S)

    writing = asyncio.create_task(write(), name="gauges")
    try:
        yield
    finally:
        writing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await writing
