"""What the hand-off of first token and drafts saves: one prefill and one decode rank, with it and without.

    python -m bench.handoff [--json FILE] [--quick] [--requests 24] [--decode-ranks 1] [--skip-plain]
        [--skip-stepping]

The same greedy prompts go, one at a time, through two proxies over the same two nodes, in turn: one passes on
prefill's token and lets decode verify its drafts, the other (`--hand-off off`) takes every token from decode.
Prints medians and means, and exits with 1 where the answers differ from each other or from plain vLLM's,
where the first decode step gives no more than 1.5 tokens, or where the client's first token comes later than
1.1 times prefill's.

Then the same prompts go to a second pair of nodes that step while they only wait for KV, as vLLM's do, and
the stages of the hand-over are shown for both (`handoff_stages.py`, `observer/stages_plugin.py`): what is
neither wire nor model nor a running step has to fall to a third.
"""

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench import handoff_stages
from bench.harness import (
    SERVED_CONTEXT,
    Stream,
    complete_all,
    completion_body,
    run_proxy,
    run_reference,
    run_stack,
    stream_completion,
)
from bench.harness import prompts as text_prompts
from bench.observer import stages_plugin
from bench.observer.install import observed

LENGTHS = (8, 32, 100, 128, 200, 256, 300, 400)
MAX_TOKENS = 32
LEAST_FIRST_STEP_TOKENS = 1.5
MOST_TTFT_SHARE = 1.1
MOST_IDLE_SHARE = 1 / 3
WARM_UPS = 3

Figures = dict[str, dict[str, float]]

_LOGGED = re.compile(r"prefilled_ms=(?P<prefilled>[\d.]+) first_token_ms=(?P<first>[\d.]+)")


@dataclass
class Answer(Stream):
    """One streamed answer. Its chunks are the engine's outputs, as they came; times are from `asked_s`."""

    asked_s: float = field(default_factory=time.monotonic)
    ttft_s: float = 0.0
    total_s: float = 0.0

    def take(self, data: str) -> None:
        super().take(data)
        if self.token_ids and not self.ttft_s:
            self.ttft_s = time.monotonic() - self.asked_s


@dataclass(frozen=True, slots=True)
class Mode:
    """What one proxy gave. `prefilled_ms` and `first_ms`: by its own log, from arrival."""

    answers: list[Answer]
    prefilled_ms: list[float]
    first_ms: list[float]
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

    @property
    def ttft_share(self) -> float:
        """First token at the proxy's front end over "prefill sampled", both from arrival; the median."""
        pairs = zip(self.first_ms, self.prefilled_ms, strict=True)
        return statistics.median(first / prefilled for first, prefilled in pairs)


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """Read one answer to its end. Raises RuntimeError for one that ends with an error."""
    answer = Answer()
    await stream_completion(client, body, answer)
    answer.total_s = time.monotonic() - answer.asked_s
    if answer.error is not None:
        raise RuntimeError(f"a request failed: {answer.error}")
    return answer


async def measure(urls: Sequence[str], bodies: Sequence[dict[str, Any]]) -> list[list[Answer]]:
    """Each body through each proxy, one at a time, the proxies in turn."""
    answers: list[list[Answer]] = [[] for _ in urls]
    for body in bodies:
        for url, taken in zip(urls, answers, strict=True):
            async with httpx.AsyncClient(base_url=url, timeout=120) as client:
                taken.append(await ask(client, body))
    return answers


def logged(log: Path, count: int) -> tuple[list[float], list[float]]:
    """(prefilled_ms, first_token_ms) of the last `count` choices of a proxy's log."""
    found = _LOGGED.findall(log.read_text())[-count:]
    return [float(prefilled) for prefilled, _ in found], [float(first) for _, first in found]


def report(on: Mode, off: Mode) -> Figures:
    """Print both side by side; returns the rows by name, each with "on" and "off"."""
    rows = [
        ("tokens in decode's first step, mean", on.first_step_tokens, off.first_step_tokens),
        ("decode steps an answer, mean", on.decode_steps, off.decode_steps),
        ("client TTFT, ms, median", on.median_ms("ttft_s"), off.median_ms("ttft_s")),
        ("whole answer, ms, median", on.median_ms("total_s"), off.median_ms("total_s")),
        (
            "prefill sampled after arrival, ms, median",
            statistics.median(on.prefilled_ms),
            statistics.median(off.prefilled_ms),
        ),
        ("first token / prefill sampled, median", on.ttft_share, off.ttft_share),
    ]
    print(f"{'':<44}{'on':>10}{'off':>10}")
    for name, with_it, without in rows:
        print(f"{name:<44}{with_it:>10.2f}{without:>10.2f}")
    return {name: {"on": with_it, "off": without} for name, with_it, without in rows}


def problems(on: Mode, off: Mode, plain: list[list[int]] | None, stages: Figures) -> list[str]:
    """What is not as it has to be; `plain` and `stages` only where they were measured."""
    found = []
    ids = [answer.token_ids for answer in on.answers]
    if ids != [answer.token_ids for answer in off.answers]:
        found.append("the answers differ with and without the hand-off")
    if plain is not None and ids != plain:
        found.append("the answers differ from plain vLLM's")
    if on.first_step_tokens <= LEAST_FIRST_STEP_TOKENS:
        found.append(f"decode's first step gives {on.first_step_tokens:.2f} tokens")
    if on.ttft_share > MOST_TTFT_SHARE:
        found.append(f"the first token comes at {on.ttft_share:.2f} of the time at which prefill has it")
    if stages and (share := stages["parked"]["idle"] / stages["stepping"]["idle"]) > MOST_IDLE_SHARE:
        found.append(f"{share:.2f} of the idle time is left")
    return found


def run_pair(
    scratch: Path, bodies: Sequence[dict[str, Any]], park: str, ranks: int
) -> tuple[Mode, Mode, Path]:
    """Start a pair of nodes and measure with and without hand-off. Returns both, and what was observed."""
    proxy_dir, stack_dir = scratch / "proxy", scratch / "stack"
    for directory in (proxy_dir, stack_dir):
        directory.mkdir(parents=True)
    flags = [f"--{role}-arg=--park={park}" for role in ("prefill", "decode")]
    with (
        observed(scratch / "observed", stages_plugin) as stages,
        run_stack(stack_dir, "--decode-ranks", str(ranks), *flags) as stack,
        run_proxy([stack.prefill], [stack.decode], proxy_dir, "--hand-off", "off") as off_url,
    ):
        urls = (stack.url, off_url)
        asyncio.run(measure(urls, bodies[:WARM_UPS]))
        on, off = asyncio.run(measure(urls, bodies))
        on_log = next(iter((stack_dir / "logs").glob("proxy*.log")))
        with_it = Mode(on, *logged(on_log, len(bodies)), from_prefill=True)
        without = Mode(off, *logged(proxy_dir / "proxy.log", len(bodies)), from_prefill=False)
    return with_it, without, stages


def compare_stages(before: Path, after: Path, lengths: Sequence[int]) -> Figures:
    """Print the stages of the last requests of both side by side; returns them, each by its rows."""
    groups = [handoff_stages.read(directory, len(lengths)) for directory in (before, after)]
    wire = handoff_stages.fastest(groups, lengths)
    stepping, parked = (handoff_stages.table(group, wire) for group in groups)
    handoff_stages.show(stepping, parked)
    return {"stepping": stepping, "parked": parked}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with what --quick stands for filled in."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.handoff", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{len(LENGTHS)} requests, compared neither with plain vLLM nor in their stages",
    )
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--decode-ranks", type=int, default=1)
    parser.add_argument("--skip-plain", action="store_true", help="do not compare with plain vLLM")
    parser.add_argument("--skip-stepping", action="store_true", help="do not compare the stages")
    options = parser.parse_args(argv)
    if options.quick:
        options.requests, options.skip_plain, options.skip_stepping = len(LENGTHS), True, True
    return options


def main() -> None:
    options = arguments()
    lengths = [LENGTHS[number % len(LENGTHS)] for number in range(options.requests)]
    bodies = [completion_body(prompt, max_tokens=MAX_TOKENS) for prompt in text_prompts(lengths, seed=11)]
    ranks: int = options.decode_ranks
    plain: list[list[int]] | None = None
    stages: Figures = {}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        if not options.skip_plain:
            (scratch / "plain").mkdir()
            with run_reference(scratch / "plain", "--max-model-len", SERVED_CONTEXT) as url:
                answers = asyncio.run(complete_all(url, bodies, concurrency=8))
                plain = [answer["choices"][0]["token_ids"] for answer in answers]
        on, off, after = run_pair(scratch / "parked", bodies, "on", ranks)
        hand_off = report(on, off)
        if not options.skip_stepping:
            *_, before = run_pair(scratch / "stepping", bodies, "off", ranks)
            stages = compare_stages(before, after, lengths)
    if options.json:
        options.json.write_text(json.dumps({"hand_off": hand_off, "stages": stages}, indent=2) + "\n")
    if found := problems(on, off, plain, stages):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
