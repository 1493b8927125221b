"""Run as a program: continues prompts greedily with vLLM offline, and prints one line of JSON.

Arguments: model directory, a JSON list with the further flags of each engine (they run one after the other),
tokens to generate, prompts as JSON lists of token ids. The answer is a list with an entry for each engine.
"""

import gc
import json
import sys
from typing import Any


def continued(directory: str, flags: dict[str, Any], count: int, prompts: list[list[int]]) -> dict[str, Any]:
    """Token ids of every prompt, and the counters of speculation (a list where vLLM counts by position)."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        model=directory,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        disable_log_stats=False,
        **flags,
    )
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    counters = {
        metric.name: metric.values if hasattr(metric, "values") else getattr(metric, "value", None)
        for metric in llm.get_metrics()
        if "spec_decode" in metric.name
    }
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return {"token_ids": [list(o.outputs[0].token_ids) for o in outputs], "counters": counters}


def main() -> None:
    directory, engines, count, prompts = sys.argv[1], *map(json.loads, sys.argv[2:5])
    answers = [continued(directory, flags, count, prompts) for flags in engines]
    sys.stdout.write(f"\n{json.dumps(answers)}\n")


if __name__ == "__main__":
    main()
