"""Samples from a real engine for the distribution test, in a process of its own; writes JSON.

Usage: engine_samples.py MODEL NUM_SPECULATIVE_TOKENS OUTPUT_FILE
"""

import json
import sys
from pathlib import Path
from typing import Any

PROMPT = [11, 42, 7, 300, 25, 9]
SAMPLES = 600


def main() -> None:
    from vllm import LLM, SamplingParams

    model, speculative_tokens = sys.argv[1], int(sys.argv[2])
    speculation: dict[str, Any] = {}
    if speculative_tokens:
        speculation = {"speculative_config": {"method": "mtp", "num_speculative_tokens": speculative_tokens}}
    width = 1 + speculative_tokens
    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=64,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [width, 8 * width, 64 * width],
        },
        **speculation,
    )

    def generate(count: int, max_tokens: int, **sampling: Any) -> list[list[int]]:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
        outputs = llm.generate([{"prompt_token_ids": PROMPT}] * count, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    seen = {
        "second": [tokens[1] for tokens in generate(SAMPLES, 3, temperature=1.0)],
        "third": [tokens[2] for tokens in generate(SAMPLES, 4, temperature=1.0)],
        "greedy": generate(1, 40, temperature=0.0)[0],
        "top_k": generate(8, 40, temperature=1.0, top_k=1),
        "top_p": generate(8, 40, temperature=1.0, top_p=1e-6),
    }
    Path(sys.argv[3]).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
