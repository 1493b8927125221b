"""Ten minutes of load on a stack whose prefill node dies: `python -m bench.soak [--json FILE] [--quick]`.

One decode node with two ranks, two prefill nodes and a proxy over them. A fifth of the requests are abandoned
by their client. Every two minutes one prefill node is killed with its engine, and started again at its
address. Each answer is compared with plain vLLM's, errors are counted by kind, and the memory of each process
that lives throughout is watched. Exits with 1 where an answer is wrong or hangs, a KV block stays in use, or
memory grows.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.harness import (
    SERVED_CONTEXT,
    Node,
    Stack,
    complete_all,
    completion_body,
    kill_all,
    prompts,
    run_node,
    run_proxy,
    run_reference,
    run_stack,
    wait_until,
)
from bench.soak.load import Load
from bench.soak.memory import Memory

LENGTHS = [3, 20, 60, 127, 128, 129, 200, 256, 300, 385, 500, 700]
MAX_TOKENS = 64
POOL = "--num-gpu-blocks-override=160"
"""Small, so that the load has touched every page of the KV pools before memory is measured."""
SHAPES = 1600
"""Prompts of random lengths before memory is measured. oneDNN, which vLLM's CPU build multiplies with, keeps
something for each number of tokens that a step has had, up to a limit: a plain vLLM server grows by half a
gigabyte over its first 900 prompts of random lengths, and no more."""
RESTART_S = 240.0
MOST_GROWTH = 0.05


@dataclass(frozen=True, slots=True)
class Plan:
    """Seconds, and requests at a time."""

    total_s: float
    kill_every_s: float
    warm_up_s: float
    shapes: int = SHAPES
    concurrency: int = 6


FULL = Plan(total_s=600, kill_every_s=120, warm_up_s=120)
QUICK = Plan(total_s=150, kill_every_s=60, warm_up_s=50, shapes=100)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A stack, whose prefill node is the one that gets killed; one more prefill node; a proxy over both."""

    stack: Stack
    survivor: Node
    url: str

    def held(self) -> list[float]:
        """KV usage of every rank of every node, and blocks in quarantine."""
        usage = [*self.stack.kv_usage(), *self.survivor.metric("lockstep_kv_cache_usage_ratio").values()]
        return [*usage, *self.stack.decode.metric("lockstep_kv_quarantined_blocks").values()]


@contextmanager
def running(directory: Path) -> Iterator[Cluster]:
    places = [directory / name for name in ("stack", "prefill", "proxy")]
    for place in places:
        place.mkdir()
    with (
        run_stack(places[0], f"--prefill-arg={POOL}", f"--decode-arg={POOL}") as stack,
        run_node("prefill", places[1], POOL) as survivor,
        run_proxy([stack.prefill, survivor], [stack.decode], places[2]) as url,
    ):
        yield Cluster(stack, survivor, url)


async def keep_killing(stack: Stack, every_s: float, restarts_s: list[float]) -> None:
    """Kill the stack's prefill node at each interval, or as soon as it is back where that takes longer.

    `restarts_s` gets how long each took.
    """
    loop = asyncio.get_running_loop()
    next_s = loop.time()
    while True:
        next_s = max(next_s + every_s, loop.time())
        await asyncio.sleep(next_s - loop.time())
        old, began_s = stack.prefill, loop.time()
        kill_all(old.pid)

        def back(old: Node = old) -> bool:
            return stack.prefill.pid != old.pid and stack.prefill.ready()

        await asyncio.to_thread(wait_until, back, "the killed prefill node is back", RESTART_S, 1.0)
        restarts_s.append(loop.time() - began_s)


async def soak(cluster: Cluster, load: Load, plan: Plan) -> dict[str, Any]:
    """All of it; returns what was counted."""
    memory = Memory(psutil.Process())
    restarts_s: list[float] = []
    async with asyncio.TaskGroup() as group:
        beside = [
            group.create_task(keep_killing(cluster.stack, plan.kill_every_s, restarts_s)),
            group.create_task(memory.sample_forever(plan.warm_up_s)),
        ]
        await load.run(plan.total_s, plan.concurrency)
        for task in beside:
            task.cancel()
    return {
        "ends": dict(load.ends),
        "wrong": load.wrong,
        "slowest_s": load.slowest_s,
        "restarts_s": restarts_s,
        "memory": memory.growth(),
    }


def problems(result: dict[str, Any]) -> list[str]:
    """What is not as it has to be."""
    found = list(result["wrong"])
    if result["ends"].get("hangs"):
        found.append(f"{result['ends']['hangs']} requests did not end")
    if not result["ends"].get("finished") or not result["ends"].get("abandoned") or not result["restarts_s"]:
        found.append("the load, the aborts or the kills did not happen")
    if any(result["held"]):
        found.append(f"KV blocks are held after the end: {result['held']}")
    for name, (_, growth) in result["memory"].items():
        if growth > MOST_GROWTH:
            found.append(f"grown by {growth:.1%}: {name}")
    return found


def shapes(count: int) -> list[dict[str, Any]]:
    """So many prompts of one token out each, no two of which begin alike."""
    lengths = random.Random(71).choices(range(2, max(LENGTHS)), k=count)
    return [completion_body(prompt, max_tokens=1) for prompt in prompts(lengths, seed=72)]


def measure(plan: Plan, place: Path) -> dict[str, Any]:
    """`place` gets the logs."""
    bodies = [
        completion_body(prompt, max_tokens=MAX_TOKENS, ignore_eos=True)
        for prompt in prompts(LENGTHS, seed=61)
    ]
    (place / "plain").mkdir(parents=True)
    with run_reference(place / "plain", "--max-model-len", SERVED_CONTEXT) as url:
        answers = asyncio.run(complete_all(url, bodies, concurrency=8))
    load_answers = [answer["choices"][0]["token_ids"] for answer in answers]
    with running(place) as cluster:
        asyncio.run(complete_all(cluster.url, shapes(plan.shapes), concurrency=6))
        result = asyncio.run(soak(cluster, Load(cluster.url, bodies, load_answers, seed=1), plan))
        cluster.stack.wait_idle(timeout_s=60)
        result["held"] = cluster.held()
    return result


def show(result: dict[str, Any]) -> None:
    for end, count in sorted(result["ends"].items()):
        print(f"{end:<40}{count:>8}")
    print(f"{'slowest request, s':<40}{result['slowest_s']:>8.1f}")
    print(f"{'kills':<40}{len(result['restarts_s']):>8}")
    print(f"{'slowest restart, s':<40}{max(result['restarts_s'], default=0):>8.1f}")
    for name, (mib, growth) in sorted(result["memory"].items()):
        print(f"{mib:>8} MiB {growth:>+7.1%}  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was counted there too")
    parser.add_argument("--quick", action="store_true", help="two and a half minutes instead of ten")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep what the processes write there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = measure(QUICK if args.quick else FULL, (args.logs or Path(name)).resolve())
    show(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))
    if found := problems(result):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
