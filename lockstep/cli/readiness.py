"""Asks a service's /readyz whether it takes requests, and passes on what it answers."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

import httpx

POLL_S = 0.25
REQUEST_TIMEOUT_S = 5.0


class ReadinessProbe:
    """One HTTP client for all polls of one run; `on_reason` gets each new reason for not being ready."""

    def __init__(self, on_reason: Callable[[str], None] = lambda _: None) -> None:
        self.reason = ""
        self._on_reason = on_reason
        # Requests stay on this machine: no proxies of the environment, no certificates to load.
        self._client = httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False, verify=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def wait_ready(self, base_url: str) -> None:
        """Poll until 200; the caller sets the deadline by cancelling."""
        while (reason := await self._ask(f"{base_url}/readyz")) != "":
            if reason != self.reason:
                self.reason = reason
                self._on_reason(reason)
            await asyncio.sleep(POLL_S)

    async def _ask(self, url: str) -> str:
        try:
            response = await self._client.get(url)
        except httpx.TransportError:
            return "no answer yet"
        if response.status_code == httpx.codes.OK:
            return ""
        try:
            body = response.json()
        except ValueError:
            body = None
        reason = body.get("reason") if isinstance(body, dict) else None
        return str(reason) if reason else f"/readyz answers {response.status_code}"
