"""One system, measured once: started, warmed up, asked, loaded, weighed, stopped."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.peers import answers, load
from bench.peers.answers import Answer
from bench.peers.catalog import Candidate
from bench.peers.load import Figures, Point
from bench.peers.processes import Running, running
from lockstep.cli.ports import PortPicker

IDLE_S = 3.0
LIMIT_S = 320.0
"""From the start command: no point is begun after that. One that keeps up is through after 190 to 240 s."""

PREFILL_TIME = re.compile(r"^vllm:request_prefill_time_seconds_(sum|count)\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Sample:
    """All figures of one start of one system.

    `prefill_ms` is vLLM's own time from scheduling a prompt to its first token, the mean over the run at
    concurrency 1, where the endpoint's metrics have it. `idle_cores` is what it burns without a request.
    `unfinished` are the points from the first that was cut off at its deadline, or had no answer.
    """

    system: str
    round: int
    start_s: float
    memory_mib: float
    idle_cores: float
    prefill_ms: float | None
    points: dict[str, Figures]
    unfinished: list[str]
    answers: list[Answer]


def measure(candidate: Candidate, round_number: int, points: list[Point], directory: Path) -> Sample:
    """`directory` gets the logs. Raises StartError if the system cannot be installed or does not answer."""
    load.prepare(points)
    with running(candidate.layout(directory, PortPicker()), directory) as system:
        start_s = answers.wait_first(system)
        _say(f"first answer after {start_s:.1f} s")
        idle_cores = _idle_cores(system)
        _, _, unfinished = _load(system, load.WARM_UP, round_number, first_seed=90)
        given = answers.ask(system.url)
        figures: dict[str, Figures] = {}
        prefill_ms = None
        if not unfinished:
            figures, prefill_ms, unfinished = _load(system, points, round_number, first_seed=0)
        return Sample(
            system=candidate.key,
            round=round_number,
            start_s=start_s,
            memory_mib=system.memory_mib(),
            idle_cores=idle_cores,
            prefill_ms=prefill_ms,
            points=figures,
            unfinished=unfinished,
            answers=given,
        )


def _load(
    system: Running, points: Sequence[Point], round_number: int, first_seed: int
) -> tuple[dict[str, Figures], float | None, list[str]]:
    """Figures by point, the prefill time at concurrency 1, and the points from the first unfinished one."""
    figures: dict[str, Figures] = {}
    prefill_ms = None
    for number, point in enumerate(points):
        before = _prefill_time(system.url)
        if time.monotonic() - system.started_at_s > LIMIT_S:
            _say(f"left out after {LIMIT_S:g} s: {[left.name for left in points[number:]]}")
            return figures, prefill_ms, [left.name for left in points[number:]]
        try:
            figures[point.name] = load.run(system, point, seed=_seed(round_number, first_seed + number))
        except (TimeoutError, RuntimeError) as error:
            _say(f"{point.name}: {str(error) or f'not through after {load.DEADLINE_S:g} s'}")
            return figures, prefill_ms, [left.name for left in points[number:]]
        if point.name == "c1":
            prefill_ms = _mean_ms(before, _prefill_time(system.url))
        _say(
            f"{point.name}: TTFT {figures[point.name].ttft_p50_ms:.1f} ms,"
            f" {figures[point.name].output_tokens_per_s:.1f} tokens/s, {figures[point.name].errors} errors"
        )
    return figures, prefill_ms, []


def _say(line: str) -> None:
    print(f"  {line}", flush=True)


def _seed(round_number: int, number: int) -> int:
    """The same prompts for all systems of a round, new ones in every round and point."""
    return 1000 * (round_number + 1) + number


def _idle_cores(system: Running) -> float:
    time.sleep(1.0)  # what the last request left to do
    cpu_s, started_s = system.cpu_s(), time.monotonic()
    time.sleep(IDLE_S)
    return (system.cpu_s() - cpu_s) / (time.monotonic() - started_s)


def _prefill_time(url: str) -> dict[str, float]:
    """`sum` in seconds and `count` of vLLM's histogram; empty where the endpoint has none."""
    try:
        page = httpx.get(f"{url}/metrics", timeout=10).text
    except httpx.TransportError:
        return {}
    return {kind: float(value) for kind, value in PREFILL_TIME.findall(page)}


def _mean_ms(before: dict[str, float], after: dict[str, float]) -> float | None:
    requests = after.get("count", 0.0) - before.get("count", 0.0)
    return 1000 * (after["sum"] - before.get("sum", 0.0)) / requests if requests else None
