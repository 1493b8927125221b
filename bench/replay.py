"""Plays the trace against one endpoint as its clients would, and holds the answers against the reference."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.trace import Item, Kind

REQUEST_TIMEOUT_S = 240.0

FailLoad = Callable[[Item], Awaitable[str]]
"""Makes a KV load fail on a rank; returns how the request ended."""


@dataclass(slots=True)
class Answer:
    """What a client got for one item."""

    item: Item
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    error: str = ""
    finished_s: float = 0.0

    @property
    def complete(self) -> bool:
        return self.finish_reason in ("stop", "length")


def body(item: Item) -> dict[str, Any]:
    """Greedy, to the full length, streamed with its token ids."""
    return {
        "model": "pico",
        "prompt": list(item.prompt),
        "max_tokens": item.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


async def play(url: str, items: Sequence[Item], fail_load: FailLoad | None, pinned: bool) -> list[Answer]:
    """Send each item at its time; returns when all have ended."""
    started = time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S) as client:

        async def one(item: Item) -> Answer:
            await asyncio.sleep(max(0.0, started + item.at_s - time.monotonic()))
            if item.kind is Kind.FAILED_LOAD and fail_load is not None:
                return Answer(item, finish_reason=await fail_load(item))
            return await _send(client, item, pinned)

        return list(await asyncio.gather(*map(one, items)))


async def _send(client: httpx.AsyncClient, item: Item, pinned: bool) -> Answer:
    answer = Answer(item)
    headers = {"X-data-parallel-rank": str(item.rank)} if pinned else {}
    try:
        async with asyncio.timeout(item.disconnect_after_s):
            async with client.stream("POST", "/v1/completions", json=body(item), headers=headers) as response:
                if response.status_code != 200:
                    answer.error = f"{response.status_code} {(await response.aread()).decode()[:200]}"
                    return answer
                async for line in response.aiter_lines():
                    _take(answer, line)
    except TimeoutError:
        answer.finish_reason = "disconnected"
    except httpx.HTTPError as error:
        answer.error = repr(error)
    answer.finished_s = time.monotonic()
    return answer


def _take(answer: Answer, line: str) -> None:
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    chunk = json.loads(line.removeprefix("data: "))
    if "error" in chunk:
        answer.error = json.dumps(chunk["error"])[:200]
        return
    for choice in chunk["choices"]:
        answer.token_ids += choice.get("token_ids") or []
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


@dataclass(frozen=True, slots=True)
class Comparison:
    """Answers against the reference; one of a client that went away must be a beginning of it."""

    compared: int
    equal: int
    partly: int
    partly_equal: int
    failed: list[str]
    """What went wrong with the others, by item."""
    different: list[str]


def compare(answers: Sequence[Answer], reference: dict[str, list[int]]) -> Comparison:
    compared = [answer for answer in answers if answer.complete]
    partly = [answer for answer in answers if answer.finish_reason == "disconnected"]
    failed = [
        f"{answer.item.name} ({answer.item.kind}): {answer.error or answer.finish_reason}"
        for answer in answers
        if answer.item.kind is not Kind.FAILED_LOAD
        and not answer.complete
        and answer.finish_reason != "disconnected"
    ]
    different = [
        f"{answer.item.name} ({answer.item.kind}): {_difference(answer, reference)}"
        for answer in compared
        if answer.token_ids != reference[answer.item.name]
    ]
    beginnings = sum(
        answer.token_ids == reference[answer.item.name][: len(answer.token_ids)] for answer in partly
    )
    return Comparison(
        len(compared), len(compared) - len(different), len(partly), beginnings, failed, different
    )


def _difference(answer: Answer, reference: dict[str, list[int]]) -> str:
    expected = reference[answer.item.name]
    for position, (ours, theirs) in enumerate(zip(answer.token_ids, expected, strict=False)):
        if ours != theirs:
            return f"token {position} of {len(expected)} is {ours}, not {theirs}"
    return f"{len(answer.token_ids)} tokens, not {len(expected)}"
