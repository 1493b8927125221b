"""Owns what the hand-off benchmark gets from its two proxies: streamed answers, their times, the table."""

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench import sse_client
from bench.harness import Stream

TIMEOUT_S = 120.0

Figures = dict[str, dict[str, float]]

_LOGGED = re.compile(r"prefilled_ms=([\d.]+)")


@dataclass
class Answer(Stream):
    """One streamed answer. Its chunks are the engine's outputs, as they came; times are from `asked_s`."""

    asked_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Mode:
    """What one proxy gave. `prefilled_ms`: when it heard of it, by its own log, from arrival."""

    answers: list[Answer]
    prefilled_ms: list[float]
    from_prefill: bool
    """Whether the first token is prefill's, and the second output decode's first step."""

    @property
    def first_step_tokens(self) -> float:
        """Mean number of tokens that decode's first step gives."""
        return statistics.mean(answer.chunk_sizes[self.from_prefill] for answer in self.answers)

    @property
    def decode_steps(self) -> float:
        """Mean number of decode steps that gave tokens, for an answer."""
        return statistics.mean(len(answer.chunk_sizes) - self.from_prefill for answer in self.answers)

    def median_ms(self, name: str) -> float:
        """Of one of the answers' times."""
        return 1000 * statistics.median(getattr(answer, name) for answer in self.answers)

    def ttft_share(self, sampled_at: Sequence[float]) -> float:
        """Client TTFT over the time from the client's request until prefill's engine had sampled, the median.

        `sampled_at`: the latter for each answer, on the machine's monotonic clock.
        """
        pairs = zip(self.answers, sampled_at, strict=True)
        return statistics.median(answer.ttft_s / (at - answer.asked_s) for answer, at in pairs)


async def ask(url: str, body: dict[str, Any]) -> Answer:
    """Read one answer to its end. Raises RuntimeError for one that ends with an error."""
    host, port = httpx.URL(url).host, httpx.URL(url).port
    assert port is not None
    stream = await sse_client.stream(host, port, sse_client.post(body), TIMEOUT_S)
    answer = Answer(
        asked_s=stream.sent_s,
        ttft_s=stream.first_event_s - stream.sent_s,
        total_s=stream.last_event_s - stream.sent_s,
    )
    for data in stream.data():
        answer.take(data.decode())
    if answer.error is not None:
        raise RuntimeError(f"a request failed: {answer.error}")
    return answer


async def measure(urls: Sequence[str], bodies: Sequence[dict[str, Any]], salt: str) -> list[list[Answer]]:
    """Each body through each proxy, one at a time, the proxies in turn.

    None finds its prompt in a prefix cache: neither that of the other proxy nor one with another `salt`.
    """
    answers: list[list[Answer]] = [[] for _ in urls]
    for body in bodies:
        for number, (url, taken) in enumerate(zip(urls, answers, strict=True)):
            taken.append(await ask(url, body | {"cache_salt": f"{salt}-{number}"}))
    return answers


def logged(log: Path, count: int) -> list[float]:
    """prefilled_ms of the last `count` choices of a proxy's log."""
    return [float(prefilled) for prefilled in _LOGGED.findall(log.read_text())[-count:]]


def report(on: Mode, off: Mode) -> Figures:
    """Print both side by side; returns the rows by name, each with "on" and "off"."""
    rows = [
        ("tokens in decode's first step, mean", on.first_step_tokens, off.first_step_tokens),
        ("decode steps an answer, mean", on.decode_steps, off.decode_steps),
        ("client TTFT, ms, median", on.median_ms("ttft_s"), off.median_ms("ttft_s")),
        ("whole answer, ms, median", on.median_ms("total_s"), off.median_ms("total_s")),
        (
            "proxy knows of the leg's end after, ms, median",
            statistics.median(on.prefilled_ms),
            statistics.median(off.prefilled_ms),
        ),
    ]
    print(f"{'':<46}{'on':>10}{'off':>10}")
    for name, with_it, without in rows:
        print(f"{name:<46}{with_it:>10.2f}{without:>10.2f}")
    return {name: {"on": with_it, "off": without} for name, with_it, without in rows}
