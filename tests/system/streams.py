"""Reads one streamed completion, token by token."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Stream:
    """What has come of a stream so far; it can be read while the stream runs."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    chunk_sizes: list[int] = field(default_factory=list)
    """Tokens of each chunk that had any."""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    """The closing [DONE] came."""

    def take(self, data: str) -> None:
        """One `data:` line of the event stream."""
        if data == "[DONE]":
            self.done = True
            return
        event = json.loads(data)
        self.error = event.get("error") or self.error
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            assert self.finish_reason is None, f"a chunk after the finish: {choice}"
            self.text += choice["text"]
            if choice.get("token_ids"):
                self.token_ids += choice["token_ids"]
                self.chunk_sizes.append(len(choice["token_ids"]))
            if choice.get("logprobs"):
                self.logprobs += choice["logprobs"]["token_logprobs"]
            self.finish_reason = choice["finish_reason"]


async def stream_completion(
    client: httpx.AsyncClient,
    body: dict[str, Any],
    into: Stream | None = None,
    headers: dict[str, str] | None = None,
) -> Stream:
    """POST a completion as a stream and read it to its end, into `into` if a caller looks on meanwhile."""
    result = Stream() if into is None else into
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                result.take(line[len("data: ") :])
    return result


async def stream_or_error(
    client: httpx.AsyncClient,
    body: dict[str, Any],
    into: Stream | None = None,
    headers: dict[str, str] | None = None,
) -> Stream:
    """As `stream_completion`; an error that came as the answer's status is the stream's error."""
    result = Stream() if into is None else into
    try:
        return await stream_completion(client, body, result, headers)
    except httpx.HTTPStatusError as error:
        result.error = {"code": error.response.status_code}
        return result


@contextlib.asynccontextmanager
async def running_stream(
    client: httpx.AsyncClient, body: dict[str, Any], into: Stream, headers: dict[str, str] | None = None
) -> AsyncIterator[None]:
    """A stream that runs beside the block; its client leaves at the end of it if there is more to come."""
    task = asyncio.create_task(stream_completion(client, body, into, headers))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
