"""Run as a program: one vLLM engine on Lockstep's CPU platform that answers orders, one JSON line each.

Arguments: K, "async" or "sync". Writes "ready" when it is. Orders are {"prompts": [[token ids]],
"max_tokens": n}, answers {"seconds": s, "token_ids": [[token ids]]}.
"""

import json
import os
import sys
import time
from typing import Any

from bench.load import PICO
from decode_node.graphs import capture_sizes

MAX_NUM_SEQS = 96


def engine(num_speculative_tokens: int, async_scheduling: bool) -> Any:
    """The flags of a decode node, but with stock scheduling, since it computes its own prompts."""
    from vllm import LLM

    return LLM(
        model=str(PICO),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=2048,
        async_scheduling=async_scheduling,
        speculative_config={"method": "mtp", "num_speculative_tokens": num_speculative_tokens},
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": capture_sizes(num_speculative_tokens, MAX_NUM_SEQS),
        },
    )


def main() -> None:
    # vLLM logs to stdout: the answers go where it was, everything else to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    llm = engine(int(sys.argv[1]), sys.argv[2] == "async")
    resolved = llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    if resolved != (sys.argv[2] == "async"):
        raise RuntimeError(f"async scheduling resolved to {resolved}")
    from vllm import SamplingParams

    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        params = SamplingParams(
            temperature=0, max_tokens=order["max_tokens"], ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": ids} for ids in order["prompts"]]
        began = time.monotonic()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.monotonic() - began
        token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps({"seconds": seconds, "token_ids": token_ids}), file=answers, flush=True)


if __name__ == "__main__":
    main()
