"""Owns the reading of the observer's files: steps by mode, whether the ranks agree, what arrived and how."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODES = {0: "NONE", 1: "PIECEWISE", 2: "FULL"}
"""vLLM's `CUDAGraphMode` (config/compilation.py)."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """One agreement of a rank with its peers; see `plugin.py`."""

    who: str
    when: str
    own_tokens: int
    own_padded_tokens: int
    own_mode: str
    mode: str
    padded_tokens: tuple[int, ...]
    """Of every rank, as agreed."""

    @property
    def is_step(self) -> bool:
        """A step of the target model: real work, or a dummy step that keeps the peers company."""
        return self.who == "target" and self.when != "startup"


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The step in which a request first ran on a rank, or went on there after a preemption."""

    request_id: str
    resumed: bool
    computed_tokens: int
    scheduled_tokens: int
    draft_tokens: int
    placeholders: int

    @property
    def local_tokens(self) -> int:
        """Tokens that were there before and are computed on this rank; 1 is the least there can be."""
        return self.scheduled_tokens - self.draft_tokens

    @property
    def padded(self) -> bool:
        return self.placeholders > 0


@dataclass(slots=True)
class RankRecord:
    """What one rank did, in order."""

    agreements: list[Agreement] = field(default_factory=list)
    first_steps: list[FirstStep] = field(default_factory=list)
    odd_steps: list[dict[str, int]] = field(default_factory=list)
    preempted: int = 0

    def steps(self) -> Counter[str]:
        """Steps of the target model by the mode that was agreed on."""
        return Counter(agreement.mode for agreement in self.agreements if agreement.is_step)

    def count(self, who: str, when: str) -> int:
        return sum((a.who, a.when) == (who, when) for a in self.agreements)


@dataclass(frozen=True, slots=True)
class Position:
    """How far each rank's file has been written; what comes after it belongs to the trace."""

    lines: dict[int, int]


def position(directory: Path) -> Position:
    return Position({rank: len(path.read_bytes().splitlines()) for rank, path in _files(directory)})


def read(directory: Path, after: Position) -> dict[int, RankRecord]:
    """Everything that was noted after a position, by rank.

    Raises:
        RuntimeError: a rank has several files, so that its process was replaced and counts are not whole.
    """
    return {
        rank: _parse(path.read_text().splitlines()[after.lines.get(rank, 0) :])
        for rank, path in _files(directory)
    }


def mismatches(ranks: Sequence[RankRecord]) -> list[str]:
    """Where the ranks' sequences of agreements differ; empty when they line up from end to end.

    The n-th agreement of every rank must be for the same model, of the same mode, and name the same padded
    sizes of all ranks; under a graph these must be one size.
    """
    found = []
    lengths = {len(rank.agreements) for rank in ranks}
    if len(lengths) > 1:
        found.append(f"numbers of agreements {sorted(lengths)}")
    for number, row in enumerate(zip(*(rank.agreements for rank in ranks), strict=False)):
        if len({(a.who, a.mode, a.padded_tokens) for a in row}) > 1:
            found.append(f"agreement {number}: {row}")
        elif row[0].mode != "NONE" and len(set(row[0].padded_tokens)) > 1:
            found.append(f"agreement {number}: {row[0].mode} with {row[0].padded_tokens} tokens")
    return found


def busy_steps(ranks: Sequence[RankRecord]) -> Counter[str]:
    """Steps of the group in which at least one rank had work, by the mode that was agreed on."""
    counted: Counter[str] = Counter()
    for row in zip(*(rank.agreements for rank in ranks), strict=False):
        if row[0].is_step and any(agreement.when == "work" for agreement in row):
            counted[row[0].mode] += 1
    return counted


def _files(directory: Path) -> Iterator[tuple[int, Path]]:
    seen = set()
    for path in sorted(directory.glob("rank*.jsonl")):
        rank = int(path.name.removeprefix("rank").split("-")[0])
        if rank in seen:
            raise RuntimeError(f"rank {rank} was started more than once: {path}")
        seen.add(rank)
        yield rank, path


def _parse(lines: Sequence[str]) -> RankRecord:
    record = RankRecord()
    for kind, *values in map(json.loads, lines):
        if kind == "a":
            record.agreements.append(_agreement(values))
        elif kind in ("new", "resumed"):
            request_id, *numbers = values
            record.first_steps.append(FirstStep(request_id, kind == "resumed", *numbers))
        elif kind == "odd":
            record.odd_steps.append(values[0])
        else:
            record.preempted += values[0]
    return record


def _agreement(values: Sequence[Any]) -> Agreement:
    who, when, own, padded, mode, agreed_mode, agreed_padded = values
    return Agreement(who, when, own, padded, MODES[mode], MODES[agreed_mode], tuple(agreed_padded))
