"""Many streams through one proxy process: no error, every answer whole, and memory that stays where it is.

    python -m bench.streams [--json FILE] [--quick] [--streams 2000] [--seconds 60]

Simulated nodes (docs/simulator.md) behind the real proxy. So many streams are open at any time; one that
ends is followed by another, and one in ten is abandoned by its client at a random place. Each answer is
compared with what the simulated model says.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop
from transformers import AutoTokenizer

from bench import sim_processes, sse_client
from bench.load import PICO
from bench.sse_client import StreamError
from lockstep.cli.ports import PortPicker

DISCONNECTS = 0.1
MAX_TOKENS = 200
STEP_MS = 500
STREAM_TIMEOUT_S = 240.0
RAMP_S = 20.0
SETTLE_S = 15.0
"""After the last stream was opened: first garbage collections, and pages that are touched once."""
GROWTH = 1.05
"""Of the median memory of the last third of the time over that of the first third; more is not flat."""

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


@dataclass
class Tally:
    """What the clients saw."""

    whole: int = 0
    abandoned: int = 0
    open_now: int = 0
    least_open: int = 10**9
    errors: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    events: int = 0


async def client(
    host: str, port: int, tally: Tally, stop_s: float, draws: random.Random, text_of: Any
) -> None:
    """One stream after the other until the time is over."""
    while time.monotonic() < stop_s:
        prompt = " ".join(draws.choices(WORDS, k=8)) + f" {draws.randrange(10**6)} "
        leaves_after = draws.randrange(1, 40) if draws.random() < DISCONNECTS else None
        request = sse_client.completion(prompt, MAX_TOKENS)
        tally.open_now += 1
        try:
            stream = await sse_client.stream(host, port, request, STREAM_TIMEOUT_S, leaves_after)
            said, expected = stream.text(), text_of(prompt)
            if not expected.startswith(said) or (said != expected and not stream.abandoned):
                tally.errors["another text"] += 1
            tally.abandoned += stream.abandoned
            tally.whole += not stream.abandoned
            tally.events += stream.num_reads
            tally.ttft_s.append(stream.first_event_s - stream.sent_s)
            if stream.num_reads > 1:
                tally.gaps_s.append((stream.last_event_s - stream.first_event_s) / (stream.num_reads - 1))
        except (StreamError, OSError) as error:
            tally.errors[f"{type(error).__name__}: {error}"[:200]] += 1
        finally:
            tally.open_now -= 1


def text_of(tokenizer: Any) -> Any:
    """What the simulated model answers to a prompt: its text over and over."""

    def answer(prompt: str) -> str:
        ids = tokenizer(prompt)["input_ids"]
        return str(tokenizer.decode([ids[index % len(ids)] for index in range(MAX_TOKENS)]))

    return answer


async def load(server: sim_processes.Server, streams: int, seconds: float) -> dict[str, Any]:
    """Open the streams over the ramp, keep them for so long, and look at the proxy once a second."""
    tally, draws = Tally(), random.Random(0)
    address = urlsplit(server.url)
    answer = text_of(AutoTokenizer.from_pretrained(PICO))
    ramp_s = RAMP_S * streams / 2000
    begun_s = time.monotonic()
    stop_s = begun_s + ramp_s + SETTLE_S + seconds
    memory_mib: list[float] = []
    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(
                client(str(address.hostname), int(address.port or 0), tally, stop_s, draws, answer)
            )
            await asyncio.sleep(ramp_s / streams)
        await asyncio.sleep(max(0.0, begun_s + ramp_s + SETTLE_S - time.monotonic()))
        cpu_s, measured_s = server.cpu_s(), time.monotonic()
        while time.monotonic() < stop_s:
            memory_mib.append(server.memory_mib())
            tally.least_open = min(tally.least_open, tally.open_now)
            await asyncio.sleep(1)
        cpu_share = (server.cpu_s() - cpu_s) / (time.monotonic() - measured_s)
    return report(tally, memory_mib, cpu_share, streams)


def report(tally: Tally, memory_mib: list[float], cpu_share: float, streams: int) -> dict[str, Any]:
    """As JSON; `flat` and `errors` decide."""
    third = max(1, len(memory_mib) // 3)
    first, last = statistics.median(memory_mib[:third]), statistics.median(memory_mib[-third:])
    cuts = statistics.quantiles(tally.ttft_s, n=100)
    return {
        "streams": streams,
        "open at least": tally.least_open,
        "answers whole": tally.whole,
        "abandoned by clients": tally.abandoned,
        "errors": sum(tally.errors.values()),
        "error kinds": dict(tally.errors.most_common(5)),
        "events": tally.events,
        "TTFT ms, p50 and p99": [round(cuts[49] * 1e3), round(cuts[98] * 1e3)],
        "ms between events, median": round(statistics.median(tally.gaps_s) * 1e3),
        "proxy cores": round(cpu_share, 2),
        "proxy MiB, first and last third": [round(first), round(last)],
        "proxy MiB, most": round(max(memory_mib)),
        "flat": last <= GROWTH * first,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.streams", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--quick", action="store_true", help="200 streams for 10 s")
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    streams, seconds = (200, 10.0) if options.quick else (options.streams, options.seconds)
    rows = str(max(8, streams // 2 + 24))
    batch = ["--max-num-seqs", rows, "--max-num-batched-tokens", str(8 * int(rows)), "--block-size", "16"]
    decode = [*batch, "--data-parallel-size", "2", "--sim-decode-step-ms", str(STEP_MS)]
    decode += ["--sim-decode-us-per-row", "0", "--sim-kv-blocks", "40000"]
    prefill = [*batch, "--sim-kv-blocks", "40000", "--sim-prefill-us-per-token", "20"]
    ports = PortPicker()
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        directory = Path(name)
        with (
            sim_processes.sim_nodes(directory, ports, prefill, decode) as nodes,
            sim_processes.proxy(directory, ports, *nodes) as server,
        ):
            result = uvloop.run(load(server, streams, seconds))
    for key, value in result.items():
        print(f"{key:>34}  {value}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["flat"] and not result["errors"] else 1


if __name__ == "__main__":
    sys.exit(main())
