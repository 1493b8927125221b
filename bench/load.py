"""One load run: vLLM's own serving benchmark against one endpoint, as figures."""

import asyncio
import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

from vllm.benchmarks.serve import add_cli_args, main_async
from vllm.utils.argparse_utils import FlexibleArgumentParser

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
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    flags = ["--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions", "--model", "pico"]
    flags += ["--tokenizer", str(PICO), "--dataset-name", "random", "--temperature", "0", "--ignore-eos"]
    flags += ["--random-input-len", str(shape.input_tokens), "--random-output-len", str(shape.output_tokens)]
    flags += ["--num-prompts", str(shape.requests), "--max-concurrency", str(concurrency)]
    # Another seed in every run: the same prompt twice would come from a prefix cache.
    flags += ["--seed", str(seed), "--disable-tqdm"]
    with contextlib.redirect_stdout(io.StringIO()):
        result = asyncio.run(main_async(parser.parse_args(flags)))
    if result["completed"] != shape.requests:
        raise RuntimeError(f"{shape.requests - result['completed']} of {shape.requests} requests failed")
    return Figures(
        ttft_ms=result["median_ttft_ms"],
        itl_ms=result["median_itl_ms"],
        tpot_ms=result["median_tpot_ms"],
        output_tokens_per_s=result["output_throughput"],
    )
