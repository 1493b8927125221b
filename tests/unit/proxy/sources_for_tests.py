"""Follows a source of nodes, and lets a test read the proxy's log."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import pytest

from proxy.discovery.source import Nodes, Source


def proxy_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The log of the proxy, whatever a service that ran in this process has made of the loggers."""
    monkeypatch.setattr(logging.getLogger("proxy"), "propagate", True)
    caplog.set_level(logging.INFO, logger="proxy")


@contextlib.asynccontextmanager
async def watched(source: Source) -> AsyncIterator[list[Nodes]]:
    """What the source reports, as it comes."""
    reports: list[Nodes] = []
    task = asyncio.create_task(source.watch(lambda nodes: reports.append(dict(nodes))))
    try:
        yield reports
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
