"""What is sent and counted: by vLLM's own serving benchmark, with processor time beside it, and by AIPerf."""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench import load
from bench.peers import aiperf
from bench.peers.processes import Running, own_cpu_s

INPUT_TOKENS = 256
OUTPUT_TOKENS = 64
PREFIX_TOKENS = 192
PREFIXES = 4
CONCURRENCY = (1, 4, 8, 16)
RATES_PER_S = (1.0, 2.0)
AIPERF_CONCURRENCY = (1, 8)


@dataclass(frozen=True, slots=True)
class Point:
    """One load: a data set, and either so many requests at a time or so many a second (Poisson)."""

    name: str
    requests: int
    dataset: str = "random"
    concurrency: int | None = None
    rate_per_s: float | None = None
    by_aiperf: bool = False


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run of one point; times in ms, ITL between two chunks, TPOT a token after the first.

    No processor time where AIPerf is the client: most of its run is its own start.
    """

    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    output_tokens_per_s: float
    errors: int
    cpu_s_per_1000_tokens: float | None = None
    client_cpu_s_per_1000_tokens: float | None = None


def points(
    concurrency: Iterable[int] = CONCURRENCY,
    rates_per_s: Iterable[float] = RATES_PER_S,
    aiperf_concurrency: Iterable[int] = AIPERF_CONCURRENCY,
    quick: bool = False,
) -> list[Point]:
    """In the order they are run; quick ones are of one kind, with half of the requests."""
    share = 2 if quick else 1
    found = [Point(f"c{level}", _requests(level) // share, concurrency=level) for level in concurrency]
    if quick:
        return found
    found += [Point(f"{rate:g}/s", int(16 * rate), rate_per_s=rate) for rate in rates_per_s]
    found += [Point("prefixes c4", 24, "prefix_repetition", concurrency=4)]
    return found + [
        Point(f"aiperf c{level}", _requests(level), concurrency=level, by_aiperf=True)
        for level in aiperf_concurrency
    ]


def _requests(concurrency: int) -> int:
    return max(16, 3 * concurrency)


DEADLINE_S = 90.0
"""Of a point; all take 5 to 25 s on two cores that keep up."""

WARM_UP = (Point("warm-up c1", 3, concurrency=1), Point("warm-up c8", 16, concurrency=8))


def prepare(points: Iterable[Point]) -> None:
    """Import or install the clients before a system starts, so that this takes no processor time from it."""
    import vllm.benchmarks.serve  # noqa: F401

    if any(point.by_aiperf for point in points):
        aiperf.prepare()


def run(system: Running, point: Point, seed: int) -> Figures:
    """One run. Requests that fail are counted, not raised: they are a figure of the system.

    Raises TimeoutError when it is not through after DEADLINE_S, RuntimeError when AIPerf got no answer.
    """
    return (_run_by_aiperf if point.by_aiperf else _run_by_vllm)(system, point, seed)


def _run_by_vllm(system: Running, point: Point, seed: int) -> Figures:
    cpu_s, client_cpu_s = system.cpu_s(), own_cpu_s()
    result = load.serve(flags(system.url, point, seed), DEADLINE_S)
    kilotokens = result["total_output_tokens"] / 1000 or float("nan")
    return Figures(
        **{
            f"{metric}_p{percentile}_ms": result[f"p{percentile}_{metric}_ms"]
            for metric in ("ttft", "itl", "tpot")
            for percentile in (50, 99)
        },
        output_tokens_per_s=result["output_throughput"],
        errors=result["failed"],
        cpu_s_per_1000_tokens=(system.cpu_s() - cpu_s) / kilotokens,
        client_cpu_s_per_1000_tokens=(own_cpu_s() - client_cpu_s) / kilotokens,
    )


def _run_by_aiperf(system: Running, point: Point, seed: int) -> Figures:
    concurrency = point.concurrency or 1
    argv = aiperf.flags(system.url, concurrency, point.requests, INPUT_TOKENS, OUTPUT_TOKENS, seed)
    with tempfile.TemporaryDirectory(prefix="lockstep-aiperf-") as folder:
        result = aiperf.serve(argv, Path(folder), DEADLINE_S)
    return Figures(**aiperf.figures(result))


def flags(url: str, point: Point, seed: int) -> list[str]:
    """Of `vllm bench serve`."""
    argv = load.flags(url, point.requests, seed)
    argv += ["--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "50,99"]
    if point.dataset == "random":
        argv += load.random_prompts(INPUT_TOKENS, OUTPUT_TOKENS)
    else:
        argv += ["--dataset-name", point.dataset, "--prefix-repetition-prefix-len", str(PREFIX_TOKENS)]
        argv += ["--prefix-repetition-suffix-len", str(INPUT_TOKENS - PREFIX_TOKENS)]
        argv += ["--prefix-repetition-num-prefixes", str(PREFIXES)]
        argv += ["--prefix-repetition-output-len", str(OUTPUT_TOKENS)]
    if point.concurrency is not None:
        argv += ["--max-concurrency", str(point.concurrency)]
    if point.rate_per_s is not None:
        argv += ["--request-rate", str(point.rate_per_s)]
    return argv
