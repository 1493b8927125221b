"""Whether a system says what plain vLLM says: the same greedy prompts, as text, to each of them."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import httpx
from tokenizers import Tokenizer

from bench.harness import prompts
from bench.load import PICO
from bench.peers.processes import Running
from bench.sim_processes import StartError

LENGTHS = [5, 16, 64, 100, 127, 128, 129, 200, 255, 256, 257, 300, 383, 384, 385, 400]
MAX_TOKENS = 40
CONCURRENCY = 4
TIMEOUT_S = 30.0
START_DEADLINE_S = 150.0
TOKEN_IDS = "return_token_ids"
"""vLLM's parameter; what refuses it is compared by text."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back; no `token_ids` from a system that does not pass them on, an `error` if nothing came."""

    text: str
    token_ids: list[int] | None
    error: str = ""


def wait_first(system: Running) -> float:
    """Seconds from the start command to the first answer. Raises StartError with what was seen instead."""
    deadline_s = time.monotonic() + START_DEADLINE_S
    seen = "no connection"
    while time.monotonic() < deadline_s:
        system.check_alive()
        try:
            answer = httpx.post(f"{system.url}/v1/completions", json=_body("def", 1), timeout=20)
            if answer.status_code == 200 and answer.json()["choices"]:
                return time.monotonic() - system.started_at_s
            seen = f"{answer.status_code}: {answer.text[:500]}"
        except httpx.TransportError as error:
            seen = repr(error)
        time.sleep(0.25)
    logs = "\n".join(f"--- {name}\n{system.log_tail(name)}" for name in system.processes)
    raise StartError(f"no answer within {START_DEADLINE_S:g} s; the last was {seen}\n{logs}")


def ask(url: str) -> list[Answer]:
    """All prompts, a few at a time."""
    return asyncio.run(_ask_all(url))


async def _ask_all(url: str) -> list[Answer]:
    tokenizer = Tokenizer.from_file(str(PICO / "tokenizer.json"))
    slots = asyncio.Semaphore(CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:

        async def one(text: str) -> Answer:
            async with slots:
                try:
                    body = _body(text, MAX_TOKENS)
                    answer = await client.post("/v1/completions", json=body | {TOKEN_IDS: True})
                    if answer.status_code == 400 and TOKEN_IDS in answer.text:
                        answer = await client.post("/v1/completions", json=body)
                except httpx.TransportError as error:
                    return Answer("", None, repr(error))
            if answer.status_code != 200:
                return Answer("", None, f"{answer.status_code}: {answer.text[:200]}")
            choice = answer.json()["choices"][0]
            return Answer(choice["text"], choice.get("token_ids"))

        return await asyncio.gather(*(one(tokenizer.decode(ids)) for ids in prompts(LENGTHS, seed=8)))


def _body(text: str, max_tokens: int) -> dict[str, Any]:
    return {
        "model": "pico",
        "prompt": text,
        "max_tokens": max_tokens,
        "temperature": 0,
    }
