"""Full-graph steps of both decode ranks on one adversarial trace: `python -m bench.full_graph`.

The same trace is played on real engines without arrival padding, under vLLM's own scheduler and under
Lockstep's, and once on a plain vLLM server, whose greedy tokens are the reference. Steps are counted where
the ranks agree on them (`observer/`), and that count is held against the node's own metric.
"""

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import full_graph_report as report
from bench import replay, trace
from bench.counters import Counters
from bench.failed_load import LoadBreaker
from bench.harness import Stack, run_reference, run_stack, wait_until
from bench.observer import records
from bench.observer.install import observed

STEPS = 5000
QUICK_STEPS = 300
SETTLE_S = 60.0
MOST_ROUNDS = 40


@dataclass(frozen=True, slots=True)
class System:
    """One way to schedule the decode node; `flags` are the node's."""

    name: str
    flags: tuple[str, ...]


SYSTEMS = {
    "off": System("arrival padding off", ("--arrival-padding", "off", "--i-know")),
    "stock": System("stock 0.32 scheduler", ("--scheduler", "stock", "--i-know")),
    "lockstep": System("Lockstep", ()),
}
ENGINE_FLAGS = ("--max-model-len", str(trace.MAX_MODEL_LEN))
DECODE_FLAGS = ("--max-num-seqs", "16", "--num-gpu-blocks-override", str(trace.KV_BLOCKS))


def reference(items: list[trace.Item]) -> dict[str, list[int]]:
    """Plain vLLM's greedy tokens for every item, all sent at once."""
    patient = [trace.Item(item.name, item.kind, 0.0, 0, item.prompt, item.max_tokens) for item in items]
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-bench-") as directory,
        run_reference(Path(directory), "--max-model-len", str(trace.CONTEXT_LIMIT)) as url,
    ):
        answers = asyncio.run(replay.play(url, patient, fail_load=None, pinned=False))
    if incomplete := [answer for answer in answers if not answer.complete]:
        raise RuntimeError(f"plain vLLM did not answer {incomplete[0]}")
    return {answer.item.name: answer.token_ids for answer in answers}


def measure(system: System, min_steps: int, expected: dict[str, list[int]], seed: int) -> dict[str, Any]:
    """Play rounds until each rank has made `min_steps` steps."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        directory = Path(name)
        with observed(directory) as written, _stack(directory / "state", system) as stack:
            start, before = _settled(stack, written, records.Position({}), None)
            began = time.monotonic()
            answers = asyncio.run(_play_rounds(stack, written, start, min_steps, seed))
            play_s = time.monotonic() - began
            _, after = _settled(stack, written, start, before)
            ranks = records.read(written, start)
    return report.result(system.name, ranks, before, after, answers, expected, play_s)


async def _play_rounds(
    stack: Stack, written: Path, start: records.Position, min_steps: int, seed: int
) -> list[replay.Answer]:
    breaker = LoadBreaker(stack.prefill.grpc_address, stack.decode.grpc_address)
    distinct = trace.rounds(seed)
    answers: list[replay.Answer] = []
    for number in range(MOST_ROUNDS):
        items = distinct[number % len(distinct)]
        answers += await replay.play(stack.url, items, breaker.fail_load, pinned=True)
        steps = [rank.steps() for rank in records.read(written, start).values()]
        of_ranks = " and ".join(f"{counted['FULL']} of {counted.total()}" for counted in steps)
        print(f"{time.strftime('%X')} round {number}: {of_ranks} steps full", flush=True)
        if min(counted.total() for counted in steps) >= min_steps:
            return answers
    raise RuntimeError(f"{MOST_ROUNDS} rounds were fewer than {min_steps} steps")


@contextlib.contextmanager
def _stack(directory: Path, system: System) -> Iterator[Stack]:
    directory.mkdir()
    decode = (*ENGINE_FLAGS, *DECODE_FLAGS, *system.flags)
    flags = [f"--prefill-arg={flag}" for flag in ENGINE_FLAGS] + [f"--decode-arg={flag}" for flag in decode]
    with run_stack(directory, *flags) as stack:
        yield stack


def _settled(
    stack: Stack, written: Path, start: records.Position, before: Counters | None
) -> tuple[records.Position, Counters]:
    """Where the observer and the metrics stand, once the group has stopped stepping and the node has counted.

    The node reads its engines once a second. After a run its counts must have grown by as much as the
    observer's; if they have not within the time, what is there is returned and the report says so.
    """
    stack.wait_idle(SETTLE_S)
    last = records.position(written)

    def still() -> bool:
        nonlocal last
        time.sleep(1.5)
        now, then = records.position(written), last
        last = now
        return now == then

    wait_until(still, "no more steps on any rank", SETTLE_S)
    counters = Counters.of(stack)
    if before is not None:
        with contextlib.suppress(AssertionError):
            wait_until(
                lambda: _counted(stack, written, start, before), "the node counts its steps", 10.0, 1.0
            )
        counters = Counters.of(stack)
    return last, counters


def _counted(stack: Stack, written: Path, start: records.Position, before: Counters) -> bool:
    steps = Counters.of(stack).steps_since(before)
    ranks = records.read(written, start)
    return {n: c.total() for n, c in steps.items()} == {n: r.steps().total() for n, r in ranks.items()}


def _kept_reference(path: Path | None, seed: int) -> dict[str, list[int]]:
    if path is not None and path.exists():
        kept: dict[str, list[int]] = json.loads(path.read_text())
        return kept
    tokens = reference([item for items in trace.rounds(seed) for item in items])
    if path is not None:
        path.write_text(json.dumps(tokens) + "\n")
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.full_graph", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps a rank")
    parser.add_argument("--steps", type=int, default=STEPS, help="least steps a rank under Lockstep")
    parser.add_argument("--other-steps", type=int, help="least steps of the others; as --steps if not given")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--reference", type=Path, help="file that keeps the reference's tokens; read instead, if it is there"
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    args = parser.parse_args()
    steps = QUICK_STEPS if args.quick else args.steps
    others = QUICK_STEPS if args.quick else args.other_steps or steps
    expected = _kept_reference(args.reference, args.seed)
    results = []
    for name in args.systems:
        results.append(measure(SYSTEMS[name], steps if name == "lockstep" else others, expected, args.seed))
        if args.json:  # after each: a run takes minutes
            args.json.write_text(json.dumps(results, indent=2) + "\n")
    report.show(results)


if __name__ == "__main__":
    main()
