"""From the samples to medians, and from these to Lockstep's ratios beside their bounds (no dependencies)."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Data = dict[str, Any]

LOCKSTEP = "lockstep"
PLAIN = "plain"
AS_THEY_COME = ("router-pull", "router-push", "smg", "dynamo")
"""The disaggregated peers as a user of them has them."""
PATCHED = "-patched"
"""Ends the keys of the same with our patch in their engines (patch.py)."""
PEERS = (*AS_THEY_COME, *(f"{peer}{PATCHED}" for peer in AS_THEY_COME))
"""All of them; Lockstep is held against the best, figure by figure."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What Lockstep's figure, divided by the best peer's, has to keep."""

    figure: str
    point: str
    limit: float
    at_least: bool = False

    def holds(self, ratio: float) -> bool:
        return ratio >= self.limit if self.at_least else ratio <= self.limit


@dataclass(frozen=True, slots=True)
class Ratio:
    """One bound, measured: which peer was the best, and by how much Lockstep differs."""

    bound: Bound
    best_peer: str
    ours: float
    theirs: float

    @property
    def value(self) -> float:
        return self.ours / self.theirs

    @property
    def holds(self) -> bool:
        return self.bound.holds(self.value)


BOUNDS = (
    Bound("ttft_p50_ms", "c1", 0.6),
    Bound("ttft_p50_ms", "c8", 0.65),
    Bound("output_tokens_per_s", "c1", 1.5, at_least=True),
    Bound("output_tokens_per_s", "c8", 1.4, at_least=True),
    Bound("cpu_s_per_1000_tokens", "c1", 0.8),
    Bound("cpu_s_per_1000_tokens", "c8", 0.8),
    Bound("memory_mib", "", 1.0),
)


def samples_of(data: Data, system: str) -> list[dict[str, Any]]:
    """One for each round, in the order in which they were taken."""
    return [sample for sample in data["samples"] if sample["system"] == system]


def median(data: Data, system: str, figure: str, point: str = "") -> float | None:
    """Over the rounds of a system; None where it has no such figure."""
    entries = samples_of(data, system)
    if point:
        entries = [sample["points"][point] for sample in entries if point in sample["points"]]
    values = [entry[figure] for entry in entries if entry.get(figure) is not None]
    return statistics.median(values) if values else None


def point_names(data: Data) -> list[str]:
    """Every point of any sample, in the order they were run."""
    return list(dict.fromkeys(name for sample in data["samples"] for name in sample["points"]))


def works(data: Data, system: str) -> bool:
    """Whether it answered at least half of what it was asked: the speed of errors is no speed."""
    given = [answer for sample in samples_of(data, system) for answer in sample["answers"]]
    return bool(given) and sum(not answer["error"] for answer in given) * 2 >= len(given)


def ratios(data: Data, peers: Iterable[str] = PEERS, bounds: Iterable[Bound] = BOUNDS) -> list[Ratio]:
    """Lockstep to the best of the peers; a bound is left out while either side has not been measured."""
    found = []
    for bound in bounds:
        ours = median(data, LOCKSTEP, bound.figure, bound.point)
        measured = [
            (value, peer)
            for peer in peers
            if works(data, peer)
            and not (bound.point and median(data, peer, "errors", bound.point))
            and (value := median(data, peer, bound.figure, bound.point)) is not None
        ]
        if ours is None or not measured:
            continue
        best: Callable[..., tuple[float, str]] = max if bound.at_least else min
        theirs, peer = best(measured)
        found.append(Ratio(bound, peer, ours, theirs))
    return found


def ttft_bound_ms(data: Data, system: str) -> float | None:
    """What Lockstep's TTFT is held against: a system's prefill time, of the same rounds, + 10 % + 2 ms.

    By its own prefill time it says what lies around prefill; by plain vLLM's also what shared cores cost.
    """
    prefill_ms = median(data, system, "prefill_ms")
    return None if prefill_ms is None else 1.1 * prefill_ms + 2.0


def throughput_bound(data: Data, point: str) -> float | None:
    """Tokens/s that Lockstep cannot pass at a point, named by the first round alone.

    Two engines, node servers, proxy and the client share the cores: with all of them always busy, a token
    takes the processor time of every process. None before a first round.
    """
    first = samples_of(data, LOCKSTEP)[:1]
    if not first or point not in first[0]["points"]:
        return None
    figures = first[0]["points"][point]
    cpu_s = figures["cpu_s_per_1000_tokens"] + figures["client_cpu_s_per_1000_tokens"]
    return float(1000 * data["machine"]["cores"] / cpu_s)


def equal_answers(data: Data, system: str) -> tuple[int, int]:
    """Answers equal to plain vLLM's first ones, of all that were asked; (0, 0) without a reference."""
    first = samples_of(data, PLAIN)[:1]
    if not first:
        return 0, 0
    pairs = [
        (mine, theirs)
        for sample in samples_of(data, system)
        for mine, theirs in zip(sample["answers"], first[0]["answers"], strict=True)
    ]
    return sum(_same(mine, theirs) for mine, theirs in pairs), len(pairs)


def _same(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    if mine["error"]:
        return False
    by_id = mine["token_ids"] is not None and theirs["token_ids"] is not None
    return bool(mine["token_ids"] == theirs["token_ids"] if by_id else mine["text"] == theirs["text"])
