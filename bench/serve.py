"""Runs vLLM's serving benchmark against a stack that is up, with defaults that fit models/pico.

Every flag of `vllm bench serve` is accepted; the module is called directly because vLLM's own command needs a
distribution named `vllm`, which the CPU build is not.
"""

import sys
from pathlib import Path

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

PICO = Path(__file__).parent.parent / "models" / "pico"


def run(argv: list[str]) -> None:
    """Parse vLLM's flags over our defaults and run the load."""
    parser = FlexibleArgumentParser(prog="bench/serve.py", description=__doc__)
    add_cli_args(parser)
    parser.set_defaults(
        backend="openai",
        endpoint="/v1/completions",
        model="pico",
        tokenizer=str(PICO),
        dataset_name="random",
        random_input_len=256,
        random_output_len=64,
        num_prompts=64,
        max_concurrency=8,
        temperature=0.0,
    )
    main(parser.parse_args(argv))


if __name__ == "__main__":
    run(sys.argv[1:])
