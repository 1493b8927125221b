"""What the hand-off of first token and drafts saves: one prefill and one decode rank, with it and without.

    python -m bench.handoff [--json FILE] [--quick] [--requests 24] [--decode-ranks 1] [--skip-plain]
        [--skip-stepping]

The same greedy prompts go, one at a time, through two proxies over the same two nodes, in turn: one passes on
prefill's token and lets decode verify its drafts, the other (`--hand-off off`) takes every token from decode.
Prints medians and means, and exits with 1 where the answers differ from each other or from plain vLLM's,
where the first decode step gives no more than 1.5 tokens, or where the client's first token comes later than
1.1 times prefill's.

Then the same prompts go to a second pair of nodes that step while they only wait for KV, and whose writer
threads look each millisecond and when a step wakes them, as vLLM's do. The stages of the hand-over are shown
for both (`handoff_stages.py`, `observer/stages_plugin.py`): what is neither wire nor model nor a running step
has to fall to a third.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import handoff_stages
from bench.handoff_answers import Figures, Mode, logged, measure, report
from bench.harness import (
    SERVED_CONTEXT,
    complete_all,
    completion_body,
    run_proxy,
    run_reference,
    run_stack,
)
from bench.harness import prompts as text_prompts
from bench.observer import stages_plugin
from bench.observer.install import observed

LENGTHS = (32, 128, 256, 400, 512, 700, 1000, 1500)
MAX_TOKENS = 32
LEAST_FIRST_STEP_TOKENS = 1.5
MOST_TTFT_SHARE = 1.1
MOST_IDLE_SHARE = 1 / 3
WARM_UPS = 3


def problems(
    on: Mode, off: Mode, ttft_share: float, plain: list[list[int]] | None, stages: Figures
) -> list[str]:
    """What is not as it has to be; `plain` and `stages` only where they were measured."""
    found = []
    ids = [answer.token_ids for answer in on.answers]
    if ids != [answer.token_ids for answer in off.answers]:
        found.append("the answers differ with and without the hand-off")
    if plain is not None and ids != plain:
        found.append("the answers differ from plain vLLM's")
    if on.first_step_tokens <= LEAST_FIRST_STEP_TOKENS:
        found.append(f"decode's first step gives {on.first_step_tokens:.2f} tokens")
    if ttft_share > MOST_TTFT_SHARE:
        found.append(f"the client has its first token {ttft_share:.2f} times as late as prefill")
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
    stepping = {stages_plugin.STEPPING_ENV: "1"} if park == "off" else {}
    with (
        observed(scratch / "observed", stages_plugin, stepping) as stages,
        run_stack(stack_dir, "--decode-ranks", str(ranks), *flags) as stack,
        run_proxy([stack.prefill], [stack.decode], proxy_dir, "--hand-off", "off") as off_url,
    ):
        urls = (stack.url, off_url)
        asyncio.run(measure(urls, bodies[:WARM_UPS], "warm-up"))
        on, off = asyncio.run(measure(urls, bodies, "measured"))
        on_log = next(iter((stack_dir / "logs").glob("proxy*.log")))
        with_it = Mode(on, logged(on_log, len(bodies)), from_prefill=True)
        without = Mode(off, logged(proxy_dir / "proxy.log", len(bodies)), from_prefill=False)
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
        sampled_at = [one.at["sampled"] for one in handoff_stages.read(after, len(lengths))]
        ttft_share = on.ttft_share(sampled_at)
        print(f"client TTFT : request to prefill sampled, median{ttft_share:>8.2f}")
        if not options.skip_stepping:
            *_, before = run_pair(scratch / "stepping", bodies, "off", ranks)
            stages = compare_stages(before, after, lengths)
    if options.json:
        figures = {"hand_off": hand_off, "ttft_share": ttft_share, "stages": stages}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    if found := problems(on, off, ttft_share, plain, stages):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
