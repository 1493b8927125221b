"""Owns the adversarial trace: which request comes when, to which rank, and what goes wrong with it.

Everything follows from the seed, so all systems get the same. A round holds each trouble once: arrivals on an
idle rank, prompts of one token, requests that end at the served context limit, more long requests than the KV
pool holds, clients that go away, and a KV load that fails.
"""

import argparse
import inspect
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tokenizers import Tokenizer

from bench.load import PICO

NUM_SPECULATIVE_TOKENS = 2
MAX_MODEL_LEN = 1024
CONTEXT_LIMIT = MAX_MODEL_LEN - 2 * NUM_SPECULATIVE_TOKENS - 1
"""What a decode node with this max_model_len serves under async scheduling."""
KV_BLOCKS = 20
"""Of 128 tokens, for each decode rank: a request at the limit takes 8."""
DISTINCT_ROUNDS = 4
"""Then they come again, so that prefix caches are hit as well."""


class Kind(StrEnum):
    LONG = "long"
    IDLE_RANK = "arrival on an idle rank"
    ONE_TOKEN = "one-token prompt"
    LIMIT = "ends at the limit"
    PRESSURE = "KV pressure"
    SHORT = "short"
    ABORT = "client goes away"
    FAILED_LOAD = "failed KV load"


@dataclass(frozen=True, slots=True)
class Item:
    """One request.

    Attributes:
        name: unique in the trace.
        at_s: when it is sent, after the start of its round.
        rank: the decode rank that it is pinned to.
        disconnect_after_s: the client goes away so long after it sent the request; None if it stays.
    """

    name: str
    kind: Kind
    at_s: float
    rank: int
    prompt: tuple[int, ...]
    max_tokens: int
    disconnect_after_s: float | None = None


def rounds(seed: int) -> list[list[Item]]:
    """The distinct rounds of the trace."""
    ids = Tokenizer.from_file(str(PICO / "tokenizer.json")).encode(inspect.getsource(argparse)).ids
    return [
        list(_Round(number, ids, random.Random(seed * 1000 + number)).items())
        for number in range(DISTINCT_ROUNDS)
    ]


class _Round:
    def __init__(self, number: int, text_ids: list[int], rng: random.Random) -> None:
        self._number = number
        self._ids = text_ids
        self._rng = rng
        self._made = 0

    def items(self) -> Iterator[Item]:
        # The ranks change places from round to round.
        one, other = self._number % 2, 1 - self._number % 2
        yield from self._arrivals(busy=one, idle=other, at_s=0.0)
        yield from self._limits(busy=other, near_limit=one, at_s=3.5)
        yield from self._pressure(at_s=7.0)
        yield from self._short(at_s=7.5)
        yield from self._disconnects(at_s=8.0)
        yield self._item(Kind.FAILED_LOAD, 9.0, one, 150, 40)

    def _arrivals(self, busy: int, idle: int, at_s: float) -> Iterator[Item]:
        """One rank decodes; the other has nothing, gets a short request, and has nothing again."""
        yield self._item(Kind.LONG, at_s, busy, 60, 300)
        for number in range(5):
            prompt_tokens = self._rng.choice((2, 5, 100, 128, 129, 255))
            yield self._item(Kind.IDLE_RANK, at_s + 0.5 + 0.5 * number, idle, prompt_tokens, 8)
        yield self._item(Kind.ONE_TOKEN, at_s + 1.2, busy, 1, 20)
        yield self._item(Kind.ONE_TOKEN, at_s + 3.2, idle, 1, 20)

    def _limits(self, busy: int, near_limit: int, at_s: float) -> Iterator[Item]:
        """Prompts of limit - k with room for k tokens, and one that generates its way to the limit."""
        yield self._item(Kind.LONG, at_s, busy, 120, 300)
        for left in range(1, NUM_SPECULATIVE_TOKENS + 3):
            yield self._item(Kind.LIMIT, at_s + 0.5 * left, near_limit, CONTEXT_LIMIT - left, left)
        yield self._item(Kind.LIMIT, at_s, near_limit, CONTEXT_LIMIT - 150, 150)

    def _pressure(self, at_s: float) -> Iterator[Item]:
        """Twelve requests that all fit when they come, and not when they have grown."""
        for number in range(12):
            prompt_tokens = self._rng.randint(150, 250)
            yield self._item(Kind.PRESSURE, at_s + 0.05 * number, number % 2, prompt_tokens, 450)

    def _short(self, at_s: float) -> Iterator[Item]:
        """Short requests one after the other between the long ones, so that the KV pool stays full."""
        for number in range(30):
            prompt_tokens = self._rng.choice((1, 3, 20, 60, 127, 129))
            max_tokens = self._rng.randint(4, 12)
            yield self._item(Kind.SHORT, at_s + 0.3 * number, number % 2, prompt_tokens, max_tokens)

    def _disconnects(self, at_s: float) -> Iterator[Item]:
        """From before the prefill to the middle of the stream."""
        for number, after_s in enumerate((0.02, 0.2, 0.6, 1.5, 4.0)):
            yield self._item(Kind.ABORT, at_s + 0.4 * number, number % 2, 140, 400, after_s)

    def _item(
        self,
        kind: Kind,
        at_s: float,
        rank: int,
        prompt_tokens: int,
        max_tokens: int,
        disconnect_after_s: float | None = None,
    ) -> Item:
        start = self._rng.randrange(len(self._ids) - prompt_tokens)
        prompt = tuple(self._ids[start : start + prompt_tokens])
        name = f"{self._number}.{self._made}"
        self._made += 1
        return Item(name, kind, at_s, rank, prompt, max_tokens, disconnect_after_s)
