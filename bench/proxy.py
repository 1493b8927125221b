"""The proxy beside other routers and vLLM's own API server, all over simulated engines with the same timing.

    python -m bench.proxy [--json FILE] [--quick] [--rounds 3] [--only NAME]

Systems take turns, round by round, under three loads: one request after the other; as many short ones as it
can take; and streams, with single requests beside them. What counts is what the system adds: TTFT over the
simulated time, and processor time of its own process. Every request opens a connection of its own.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from bench import proxy_peers, sim_processes, sse_client
from bench.load import PICO
from bench.sim_processes import Server, StartError
from lockstep.cli.ports import PortPicker
from lockstep.sim.config import SimFigures

PROMPT = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
FIGURES = SimFigures(
    sim_prefill_step_ms=4,
    sim_prefill_us_per_token=20,
    sim_push_ms=1,
    sim_push_us_per_token=1,
    sim_decode_step_ms=20,
    sim_decode_us_per_row=0,
)
SATURATION_STREAMS = 64
STREAMS = 64
STREAM_TOKENS = 240
STREAM_WAVES = 2
TIMEOUT_S = 60.0
ROW_FLAGS = ("--max-num-seqs", "256", "--max-num-batched-tokens", "2048", "--block-size", "16")
LOCKSTEP, FLOOR, BARE = "Lockstep proxy", "vLLM's API server", "simulated server alone"


@dataclass(frozen=True, slots=True)
class System:
    """One system under load."""

    name: str
    server: Server


@dataclass(frozen=True, slots=True)
class Load:
    """How long each load is."""

    single_requests: int
    saturation_s: float


def sim_flags() -> list[str]:
    """The figures as flags of whatever simulates."""
    return [
        part
        for name in FIGURES.model_fields_set
        for part in (f"--{name.replace('_', '-')}", str(getattr(FIGURES, name)))
    ]


@contextlib.contextmanager
def systems(only: str | None) -> Iterator[tuple[list[System], dict[str, str], int]]:
    """All of them up at once, what could not be started with its error, and the tokens of the prompt."""
    prompt_tokens = len(AutoTokenizer.from_pretrained(PICO)(PROMPT)["input_ids"])
    ports, errors, found = PortPicker(), {}, []
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-bench-")))
        bare = stack.enter_context(_module(directory, "sim_vllm_server", ports, _server_flags(prompt_tokens)))
        found.append(System(BARE, bare))
        for peer in proxy_peers.PEERS:
            try:
                server = stack.enter_context(proxy_peers.running(peer, bare.url, directory, ports))
                found.append(System(peer.name, server))
            except StartError as error:
                errors[peer.name] = str(error)
        vllm_flags = ["--model", str(PICO), "--served-model-name", "pico", "--disable-uvicorn-access-log"]
        found.append(
            System(FLOOR, stack.enter_context(_module(directory, "vllm_floor", ports, vllm_flags, "/health")))
        )
        flags = [*sim_flags(), *ROW_FLAGS]
        nodes = stack.enter_context(sim_processes.sim_nodes(directory, ports, flags, flags))
        found.append(System(LOCKSTEP, stack.enter_context(sim_processes.proxy(directory, ports, *nodes))))
        yield [system for system in found if only in (None, system.name)], errors, prompt_tokens


def _server_flags(prompt_tokens: int) -> list[str]:
    return ["--prompt-tokens", str(prompt_tokens)]


@contextlib.contextmanager
def _module(
    directory: Path, module: str, ports: PortPicker, flags: list[str], path: str = "/v1/models"
) -> Iterator[Server]:
    """A server of this folder."""
    port, log = ports.take(), directory / f"{module}.log"
    argv = [sys.executable, "-m", f"bench.{module}", "--port", str(port), *sim_flags(), *flags]
    with sim_processes.started(argv, log) as process:
        server = Server(f"http://127.0.0.1:{port}", process)
        sim_processes.wait_answers(process, f"{server.url}{path}", log)
        yield server


async def measure(system: System, load: Load, simulated_ttft_s: float) -> dict[str, Any]:
    """One round of one system. Raises StreamError for an answer that is not whole."""
    server = system.server
    alone = await _singles(system, load.single_requests)

    cpu_s, begun_s = server.cpu_s(), time.monotonic()
    requests = await _saturate(system, begun_s + load.saturation_s)
    requests_per_s = requests / (time.monotonic() - begun_s)
    ms_per_request = (server.cpu_s() - cpu_s) / requests * 1e3

    cpu_s = server.cpu_s()
    beside: list[float] = []
    streams = asyncio.create_task(_streams(system))
    while not streams.done():
        beside += await _singles(system, 1)
    tokens = await streams
    own_requests = STREAMS * STREAM_WAVES + len(beside)
    stream_cpu_s = server.cpu_s() - cpu_s - own_requests * ms_per_request / 1e3
    return {
        "alone": [ttft_s - simulated_ttft_s for ttft_s in alone],
        "beside": [ttft_s - simulated_ttft_s for ttft_s in beside],
        "requests_per_s": requests_per_s,
        "ms_per_request": ms_per_request,
        "us_per_token": stream_cpu_s / tokens * 1e6,
        "memory_mib": server.memory_mib(),
    }


async def _one(system: System, max_tokens: int) -> sse_client.Stream:
    address = urlsplit(system.server.url)
    request = sse_client.completion(PROMPT, max_tokens)
    stream = await sse_client.stream(str(address.hostname), int(address.port or 0), request, TIMEOUT_S)
    if stream.events()[-1].choices[0].finish_reason != "length":
        raise sse_client.StreamError(f"{system.name}: an answer ended otherwise than by its length")
    return stream


async def _singles(system: System, number: int) -> list[float]:
    """TTFT of so many requests, one after the other."""
    streams = [await _one(system, 4) for _ in range(number)]
    return [stream.first_event_s - stream.sent_s for stream in streams]


async def _saturate(system: System, stop_s: float) -> int:
    """Short requests, each followed by the next at once; returns how many were answered."""

    async def worker() -> int:
        answered = 0
        while time.monotonic() < stop_s:
            await _one(system, 1)
            answered += 1
        return answered

    return sum(await asyncio.gather(*(worker() for _ in range(SATURATION_STREAMS))))


async def _streams(system: System) -> int:
    """Waves of streams that begin together; returns their tokens."""
    for _ in range(STREAM_WAVES):
        await asyncio.gather(*(_one(system, STREAM_TOKENS) for _ in range(STREAMS)))
    return STREAMS * STREAM_WAVES * STREAM_TOKENS


def run(found: list[System], rounds: int, load: Load, simulated_ttft_s: float) -> dict[str, Any]:
    """Medians over the rounds; percentiles over all requests of all rounds."""
    samples: dict[str, list[dict[str, Any]]] = {system.name: [] for system in found}
    errors: dict[str, str] = {}
    for turn in range(-1, rounds):  # the first is a warm-up
        for system in found:
            if system.name in errors:
                continue
            try:
                warm_up = Load(4, 0.5)
                sample = uvloop.run(measure(system, warm_up if turn < 0 else load, simulated_ttft_s))
            except (sse_client.StreamError, OSError) as error:
                errors[system.name] = f"{type(error).__name__}: {error}"
                continue
            if turn >= 0:
                samples[system.name].append(sample)
    figures = {name: _figures(taken) for name, taken in samples.items() if name not in errors}
    return {"figures": figures, "errors": errors}


def _figures(samples: list[dict[str, Any]]) -> dict[str, float]:
    result: dict[str, float] = {}
    for name in ("alone", "beside"):
        pooled = sorted(value * 1e3 for sample in samples for value in sample[name])
        result[f"added_ttft_{name}_p50_ms"] = statistics.median(pooled)
        result[f"added_ttft_{name}_p99_ms"] = pooled[min(len(pooled) - 1, int(0.99 * len(pooled)))]
    for name in ("requests_per_s", "ms_per_request", "us_per_token", "memory_mib"):
        result[name] = statistics.median(sample[name] for sample in samples)
    return result


def show(result: dict[str, Any]) -> None:
    table = Table(title="Medians of alternating rounds")
    columns = {
        "added_ttft_alone_p50_ms": "added TTFT p50 ms",
        "added_ttft_alone_p99_ms": "p99",
        "added_ttft_beside_p50_ms": f"beside {STREAMS} streams p50 ms",
        "added_ttft_beside_p99_ms": "p99 ",
        "requests_per_s": "requests/s",
        "ms_per_request": "CPU ms a request",
        "us_per_token": "CPU us a token",
        "memory_mib": "MiB",
    }
    table.add_column("system")
    for title in columns.values():
        table.add_column(title, justify="right")
    for name, figures in result["figures"].items():
        table.add_row(name, *(f"{figures[key]:.{0 if figures[key] > 100 else 2}f}" for key in columns))
    console = Console(width=140)
    console.print(table)
    for name, error in result["errors"].items():
        console.print(f"{name}: not measured: {error}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.proxy", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="name of one system")
    options = parser.parse_args()
    load = Load(10, 1.0) if options.quick else Load(40, 2.5)
    with systems(options.only) as (found, errors, prompt_tokens):
        result = run(
            found, 1 if options.quick else options.rounds, load, FIGURES.prefill_step_s(prompt_tokens)
        )
    result["errors"] |= errors
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    show(result)
    return 1 if LOCKSTEP in result["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
