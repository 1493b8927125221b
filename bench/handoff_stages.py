"""Owns the stages of the hand-over: what lies between prefill's drafts and decode's first step."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PREFILL = ("sampled", "drafted", "staged", "posting", "posted", "written", "telling")
DECODE = ("seen", "admitted", "first_step", "first_token")
STAGES = PREFILL + DECODE
"""As `observer/stages_plugin.py` notes them."""

ROWS = (
    "drafted to staged",
    "staged to write posted",
    "wire: write",
    "write done to looked at",
    "looked at to notice sent",
    "wire: notice",
    "notice there to seen",
    "waited for the running step",
    "seen to admitted",
    "admitted to first step",
    "model: first step",
)
NOT_IDLE = ("wire: write", "wire: notice", "waited for the running step", "model: first step")


@dataclass(frozen=True, slots=True)
class HandOver:
    """One request's times in seconds by stage. `waited`: from "seen", for a step of other requests to end."""

    at: dict[str, float]
    waited_s: float

    def between(self, first: str, second: str) -> float:
        return self.at[second] - self.at[first]


def read(directory: Path, count: int) -> list[HandOver]:
    """The last `count` hand-overs, in the order of their first tokens."""
    prefills: dict[str, dict[str, float]] = {}
    whole: list[HandOver] = []
    engines = [_read_engine(path) for path in directory.glob("*.jsonl")]
    for at, _ in engines:
        prefills |= {request_id: times for request_id, times in at.items() if "sampled" in times}
    for at, steps in engines:
        for request_id, times in at.items():
            if "admitted" in times and request_id in prefills:  # both engines have a first step of it
                known = _of(prefills[request_id], PREFILL) | _of(times, DECODE)
                if len(known) == len(STAGES):
                    whole.append(HandOver(known, _waited(known, steps)))
    return sorted(whole, key=lambda one: one.at["sampled"])[-count:]


def _of(times: dict[str, float], stages: Sequence[str]) -> dict[str, float]:
    return {stage: times[stage] for stage in stages if stage in times}


def _read_engine(path: Path) -> tuple[dict[str, dict[str, float]], list[tuple[float, float]]]:
    """One process: times by request and stage, and the steps with rows."""
    at: dict[str, dict[str, float]] = defaultdict(dict)
    steps: list[tuple[float, float]] = []
    for line in path.read_text().splitlines():
        stage, *rest = json.loads(line)
        if stage == "ran":
            dummy, start, end = rest
            steps += [] if dummy else [(start, end)]
        else:
            request_id, when = rest
            at[request_id][stage] = when  # a request is staged, posted and written by chunks: the last counts
    return at, steps


def _waited(times: dict[str, float], steps: Iterable[tuple[float, float]]) -> float:
    """How long a step with rows that ran when the notice was seen went on."""
    seen = times["seen"]
    ends = [end for start, end in steps if start <= seen < end]
    return max((min(end, times["first_step"]) - seen for end in ends), default=0.0)


def table(hand_overs: Sequence[HandOver], wire: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Milliseconds of each row, the median, and "idle", that of the sums of what is no wire, model or step.

    `wire`: for each hand-over the seconds of its write after NIXL's call has returned, which is wire as well,
    and those of its notice from the call on: decode may have it before the call returns.
    """
    rows: dict[str, list[float]] = {name: [] for name in ROWS}
    sums = []
    for one, (write_s, notice_s) in zip(hand_overs, wire, strict=True):
        seen_to_admitted = one.between("seen", "admitted")
        parts = (
            one.between("drafted", "staged"),
            one.between("staged", "posting"),
            one.between("posting", "posted") + write_s,
            one.between("posted", "written") - write_s,
            one.between("written", "telling"),
            notice_s,
            one.between("telling", "seen") - notice_s,
            min(one.waited_s, seen_to_admitted),
            seen_to_admitted - min(one.waited_s, seen_to_admitted),
            one.between("admitted", "first_step"),
            one.between("first_step", "first_token"),
        )
        for name, seconds in zip(ROWS, parts, strict=True):
            rows[name].append(1000 * seconds)
        sums.append(sum(values[-1] for name, values in rows.items() if name not in NOT_IDLE))
    medians = {name: statistics.median(values) for name, values in rows.items()}
    return medians | {"idle": statistics.median(sums), "idle, mean": statistics.mean(sums)}


def fastest(groups: Sequence[Sequence[HandOver]], lengths: Sequence[int]) -> list[tuple[float, float]]:
    """What the wire takes of write and notice, for each place of the groups: the fastest of its length.

    A pause between two looks is part of what is seen, so the wire can only be quicker than this.
    """
    best: dict[int, tuple[float, float]] = {}
    for group in groups:
        for one, length in zip(group, lengths, strict=True):
            write, notice = one.between("posted", "written"), one.between("telling", "seen")
            known = best.get(length, (write, notice))
            best[length] = min(known[0], write), min(known[1], notice)
    return [best[length] for length in lengths]


def show(before: dict[str, float], after: dict[str, float]) -> None:
    """Both tables side by side."""
    print(f"\n{'stage of the hand-over, ms, median':<44}{'stepping':>10}{'parked':>10}")
    for name in (*ROWS, "idle", "idle, mean"):
        print(f"{name:<44}{before[name]:>10.2f}{after[name]:>10.2f}")
    print(f"{'idle, parked : stepping':<44}{'':>10}{after['idle'] / before['idle']:>10.2f}")
