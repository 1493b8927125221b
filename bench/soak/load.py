"""The soak's clients: streams of known answers, some of them abandoned, counted by how they end."""

import asyncio
import collections
import random
import time
from collections.abc import Sequence
from typing import Any

import httpx

from bench.harness import Stream, stream_completion

ABORTED_SHARE = 0.2
DEADLINE_S = 60.0
"""Of one request; every wait of the product ends before."""
ABORT_WITHIN_S = 2.0
"""About as long as an answer takes, so that every stage of a request is hit."""
PAUSE_WITHIN_S = 2.0
"""Between two requests of a client: a node that starts again needs a share of the cores."""


class Load:
    """So many clients at a time, each with one request after the other.

    `ends` counts the requests by how they ended: "finished", "abandoned", or the kind of their error.
    """

    def __init__(
        self, url: str, bodies: Sequence[dict[str, Any]], answers: Sequence[list[int]], seed: int
    ) -> None:
        self._url = url
        self._asked = list(zip(bodies, answers, strict=True))
        self._random = random.Random(seed)
        self.ends: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.slowest_s = 0.0

    async def run(self, total_s: float, concurrency: int) -> None:
        """Returns when the last request has ended, at most DEADLINE_S after `total_s`."""
        until_s = time.monotonic() + total_s
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=DEADLINE_S, limits=limits) as client,
            asyncio.TaskGroup() as clients,
        ):
            for _ in range(concurrency):
                clients.create_task(self._one_client(client, until_s))

    async def _one_client(self, client: httpx.AsyncClient, until_s: float) -> None:
        while time.monotonic() < until_s:
            body, answer = self._random.choice(self._asked)
            patience_s = None
            if self._random.random() < ABORTED_SHARE:
                patience_s = self._random.uniform(0, ABORT_WITHIN_S)
            began_s = time.monotonic()
            end = await self._one_request(client, body, answer, patience_s)
            self.ends[end] += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
            await asyncio.sleep(self._random.uniform(0, PAUSE_WITHIN_S))

    async def _one_request(
        self, client: httpx.AsyncClient, body: dict[str, Any], answer: list[int], patience_s: float | None
    ) -> str:
        stream = Stream()
        end = ""
        try:
            async with asyncio.timeout(DEADLINE_S if patience_s is None else patience_s):
                await stream_completion(client, body, stream)
        except TimeoutError:
            end = "hangs" if patience_s is None else "abandoned"
        except httpx.HTTPStatusError as error:
            end = f"HTTP {error.response.status_code}"
        except httpx.TransportError as error:
            end = type(error).__name__
        if stream.token_ids != answer[: len(stream.token_ids)]:
            self.wrong.append(f"{len(body['prompt'])} tokens in: {stream.token_ids} is not {answer}")
        if end:
            return end
        if stream.error is not None:
            return f"error event {stream.error.get('code')} {stream.error.get('type')}"
        if len(stream.token_ids) != len(answer):
            self.wrong.append(f"{len(body['prompt'])} tokens in: {len(stream.token_ids)} tokens out")
        return "finished"
