"""Opens pages in headless Chromium, or skips where Playwright or Chromium is missing."""

import contextlib
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_MS = 20_000


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Any]:
    """A Playwright browser over the Chromium of the machine; Playwright's own is not needed."""
    playwright = pytest.importorskip("playwright.async_api", reason="the package playwright is not installed")
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if found is None:
        pytest.skip(f"none of {', '.join(CHROMIUM)} is installed")
    async with playwright.async_playwright() as driver:
        running = await driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        try:
            yield running
        finally:
            await running.close()


@contextlib.asynccontextmanager
async def page(running: Any, url: str, **context: Any) -> AsyncIterator[Any]:
    """An open page; whatever it complains about on its console fails the test at the end."""
    opened = await running.new_context(**context)
    opened.set_default_timeout(TIMEOUT_MS)
    shown = await opened.new_page()
    complaints: list[str] = []
    shown.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
    shown.on("pageerror", lambda error: complaints.append(str(error)))
    try:
        await shown.goto(url)
        yield shown
        assert complaints == []
    finally:
        await opened.close()
