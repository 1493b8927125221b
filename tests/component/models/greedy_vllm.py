"""Run as a program: continues prompts greedily with vLLM offline, and prints one line of JSON.

Arguments: model directory, number of MTP draft tokens (0 for none), tokens to generate, prompts as JSON lists
of token ids.
"""

import json
import sys
from typing import Any


def main() -> None:
    directory, num_speculative_tokens, count, prompts = sys.argv[1], *map(json.loads, sys.argv[2:5])
    from vllm import LLM, SamplingParams

    flags: dict[str, Any] = {}
    if num_speculative_tokens:
        flags["speculative_config"] = {"method": "mtp", "num_speculative_tokens": num_speculative_tokens}
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
    counters = {m.name: getattr(m, "value", None) for m in llm.get_metrics() if "spec_decode" in m.name}
    answer = {"token_ids": [list(o.outputs[0].token_ids) for o in outputs], "counters": counters}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    main()
