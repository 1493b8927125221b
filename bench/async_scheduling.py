"""Async against sync scheduling, same tokens and how much faster: `python -m bench.async_scheduling`.

For each K two engines on one rank, one of each kind, take turns with the same prompts; with --stack two whole
Lockstep stacks do (K = 2). Figures are medians of the alternating runs.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.harness import complete_all, completion_body, run_stack
from bench.load import PICO

PROMPT_COUNTS = (24, 48, 96)
SPECULATIVE_TOKENS = (1, 2, 3)
STACK_PROMPTS = 48
OUTPUT_TOKENS = 64
VOCABULARY = 2048
MODES = ("sync", "async")

Prompts = list[list[int]]
Run = Callable[[Prompts], tuple[float, Prompts]]
"""Generates for all prompts at once; returns seconds and the token ids of each."""


def prompts(count: int, seed: int) -> Prompts:
    """Random prompts of 8 to 64 tokens, so that a run is mostly decode."""
    rng = random.Random(seed)
    return [[rng.randrange(2, VOCABULARY) for _ in range(rng.randint(8, 64))] for _ in range(count)]


def compare(where: str, k: int, count: int, systems: dict[str, Run], runs: int) -> dict[str, Any]:
    """Both systems on the same prompts, taking turns; other prompts in each run."""
    seconds: dict[str, list[float]] = {mode: [] for mode in systems}
    equal = total = 0
    for run in range(-1, runs):  # the first is a warm-up
        wanted = prompts(count, seed=10000 * k + 100 * count + run)
        answers = {}
        order = list(systems) if run % 2 else list(reversed(systems))
        for mode in order:
            run_s, answers[mode] = systems[mode](wanted)
            if run >= 0:
                seconds[mode].append(run_s)
        total += count
        equal += sum(a == b for a, b in zip(answers["sync"], answers["async"], strict=True))
    rates = {mode: count * OUTPUT_TOKENS / statistics.median(values) for mode, values in seconds.items()}
    return {
        "where": where,
        "num_speculative_tokens": k,
        "prompts": count,
        "sync_tokens_per_s": rates["sync"],
        "async_tokens_per_s": rates["async"],
        "speedup": rates["async"] / rates["sync"],
        "answers_equal": equal,
        "answers": total,
        "seconds": seconds,
    }


@contextlib.contextmanager
def engine(k: int, mode: str) -> Iterator[Run]:
    """One engine in a process of its own, on one thread; the first call waits until it is up."""
    env = os.environ | {
        "LOCKSTEP_CPU_PLATFORM": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "bench.async_engine", str(k), mode]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env, text=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        orders, answers = process.stdin, process.stdout
        ready = False

        def line() -> str:
            if not (text := answers.readline()):
                log.seek(0)
                raise RuntimeError(f"the {mode} engine ended: {log.read()[-2000:].decode()}")
            return text

        def run(wanted: Prompts) -> tuple[float, Prompts]:
            nonlocal ready
            ready = ready or bool(line())
            orders.write(json.dumps({"prompts": wanted, "max_tokens": OUTPUT_TOKENS}) + "\n")
            orders.flush()
            answer = json.loads(line())
            return answer["seconds"], answer["token_ids"]

        try:
            yield run
        finally:
            orders.close()
            process.wait(timeout=60)


def measure_engines(k: int, runs: int) -> Iterator[dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        systems = {mode: stack.enter_context(engine(k, mode)) for mode in MODES}
        for count in PROMPT_COUNTS:
            yield compare("one engine", k, count, systems, runs)


def measure_stacks(runs: int) -> Iterator[dict[str, Any]]:
    """Two whole stacks up at once; prefill and decode of one have the same kind of scheduling."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-bench-")))
        systems: dict[str, Run] = {}
        for mode in MODES:
            state = directory / mode
            state.mkdir()
            flag = "--async-scheduling" if mode == "async" else "--no-async-scheduling"
            flags = (f"--prefill-arg={flag}", f"--decode-arg={flag}")
            systems[mode] = _of_url(stack.enter_context(run_stack(state, *flags)).url)
        yield compare("1 P + 2 D ranks", 2, STACK_PROMPTS, systems, runs)


def _of_url(url: str) -> Run:
    def run(wanted: Prompts) -> tuple[float, Prompts]:
        bodies = [completion_body(ids, max_tokens=OUTPUT_TOKENS, ignore_eos=True) for ids in wanted]
        began = time.monotonic()
        answers = asyncio.run(complete_all(url, bodies, concurrency=len(bodies)))
        return time.monotonic() - began, [answer["choices"][0]["token_ids"] for answer in answers]

    return run


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"Greedy, {OUTPUT_TOKENS} tokens each, {PICO.name}; medians of alternating runs")
    for column in ("where", "K", "prompts", "sync tokens/s", "async tokens/s", "async/sync", "equal answers"):
        table.add_column(column, justify="left" if column == "where" else "right")
    for row in rows:
        table.add_row(
            row["where"],
            str(row["num_speculative_tokens"]),
            str(row["prompts"]),
            f"{row['sync_tokens_per_s']:.1f}",
            f"{row['async_tokens_per_s']:.1f}",
            f"{row['speedup']:.3f}",
            f"{row['answers_equal']} of {row['answers']}",
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.async_scheduling", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="one run of each")
    parser.add_argument("--runs", type=int, default=5, help="runs of each that the medians are of")
    parser.add_argument("--k", type=int, nargs="*", default=list(SPECULATIVE_TOKENS), help="values of K")
    parser.add_argument("--no-stack", dest="stack", action="store_false", help="without the whole stacks")
    args = parser.parse_args()
    runs = 1 if args.quick else args.runs
    stacks = [measure_stacks(runs)] if args.stack else []
    rows = []
    for row in itertools.chain(*(measure_engines(k, runs) for k in args.k), *stacks):
        rows.append(row)
        if args.json:  # after each: a run takes minutes
            args.json.write_text(json.dumps(rows, indent=2) + "\n")
    show(rows)


if __name__ == "__main__":
    main()
