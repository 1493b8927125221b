"""Waits inside an event loop; `harness.wait_until` is for outside of one."""

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], bool], what: str, timeout_s: float, interval_s: float = 0.01) -> None:
    """Poll until the condition holds; AssertionError at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(interval_s)
