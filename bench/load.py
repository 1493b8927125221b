"""vLLM's own serving benchmark against one endpoint: its flags, a run of it, and one load as figures."""

import asyncio
import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PICO = Path(__file__).parent.parent / "models" / "pico"


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians over the requests of one run; ITL is between two chunks, which is one decode step."""

    ttft_ms: float
    itl_ms: float
    tpot_ms: float
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Shape:
    """What a run sends: random prompts of pico's vocabulary, greedy, to the full output length."""

    input_tokens: int = 256
    output_tokens: int = 64
    requests: int = 16


def run(url: str, shape: Shape, concurrency: int, seed: int) -> Figures:
    """Raises RuntimeError when a request failed: half a run is no measurement."""
    argv = flags(url, shape.requests, seed) + random_prompts(shape.input_tokens, shape.output_tokens)
    result = serve([*argv, "--max-concurrency", str(concurrency)])
    if result["completed"] != shape.requests:
        raise RuntimeError(f"{shape.requests - result['completed']} of {shape.requests} requests failed")
    return Figures(
        ttft_ms=result["median_ttft_ms"],
        itl_ms=result["median_itl_ms"],
        tpot_ms=result["median_tpot_ms"],
        output_tokens_per_s=result["output_throughput"],
    )


def flags(url: str, requests: int, seed: int) -> list[str]:
    """What every run has in common. Give each another seed: a prompt twice would come from a prefix cache."""
    argv = ["--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions", "--model", "pico"]
    argv += ["--tokenizer", str(PICO), "--temperature", "0", "--ignore-eos", "--disable-tqdm"]
    return [*argv, "--num-prompts", str(requests), "--seed", str(seed)]


def random_prompts(input_tokens: int, output_tokens: int) -> list[str]:
    """The flags of its data set of random tokens."""
    lengths = ["--random-input-len", str(input_tokens), "--random-output-len", str(output_tokens)]
    return ["--dataset-name", "random", *lengths]


def serve(argv: Sequence[str], deadline_s: float | None = None) -> dict[str, Any]:
    """Run it in this process, and return its figures. Raises TimeoutError at the deadline."""
    # Here, since importing vLLM takes seconds and the flags can be looked at without it.
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    with contextlib.redirect_stdout(io.StringIO()):
        result: dict[str, Any] = asyncio.run(
            asyncio.wait_for(main_async(parser.parse_args(list(argv))), deadline_s)
        )
    return result
