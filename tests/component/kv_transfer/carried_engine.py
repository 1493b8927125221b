"""Runs one engine in a process of its own: requests to their end, and again with a part of it carried.

Usage: carried_engine.py MODEL ASYNC OUTPUT_FILE, ASYNC being "async" or "sync". Writes JSON: {"cases": {name:
[{"whole": answer, "continued": [{"carried": tokens, "cold": bool} | answer]}]}, "sampled": {"whole" |
"continued": [[token, ...]]}}, an answer being {"tokens", "finish", "stop", "logprobs"}.
"""

import json
import sys
from pathlib import Path
from typing import Any

SPECULATIVE_TOKENS = 2
MAX_TOKENS = 40
# 25 and 61 tokens: with blocks of 32, carrying 7 or 3 ends on a block's edge.
PROMPTS = [[11 + 7 * i for i in range(25)], [300 + 3 * (i % 17) for i in range(61)]]
CARRIED = [1, 2, 3, 4, 6, 7, 8, 19, 20, 21]
SAMPLES = 600
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def make_engine(model: str, asynchronous: bool) -> Any:
    from vllm import LLM

    width = 1 + SPECULATIVE_TOKENS
    return LLM(
        model=model,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=16,
        # So few that most prompts are computed in chunks, which end among the carried tokens too.
        max_num_batched_tokens=64,
        block_size=32,
        async_scheduling=asynchronous,
        scheduler_cls="kv_transfer.carried.vllm_schedulers.make_scheduler",
        speculative_config={"method": "mtp", "num_speculative_tokens": SPECULATIVE_TOKENS},
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [width, 8 * width, 16 * width],
        },
    )


def sampling(carried: list[int] | None = None, **kwargs: Any) -> Any:
    from vllm import SamplingParams

    bad_words = kwargs.pop("bad_words_token_ids", None)
    params = SamplingParams(
        **{"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True, "detokenize": False} | kwargs
    )
    if bad_words:
        params._bad_words_token_ids = bad_words
    if carried:
        params.extra_args = {"kv_transfer_params": {"lockstep_output_token_ids": carried}}
    return params


def cases(plain: list[int]) -> dict[str, dict[str, Any]]:
    """Sampling parameters by name, chosen so that they change the `plain` answer."""
    from vllm.sampling_params import StructuredOutputsParams

    return {
        "plain": {},
        "logprobs": {"logprobs": 3},
        "repetition_penalty": {"repetition_penalty": 1.3, "logprobs": 1},
        "presence_penalty": {"presence_penalty": 1.5},
        "frequency_penalty": {"frequency_penalty": 1.2},
        "min_tokens": {"min_tokens": 20, "stop_token_ids": sorted(set(plain[:10]))},
        "stop_token_ids": {"stop_token_ids": [plain[-1]], "min_tokens": 5},
        "bad_words": {"bad_words_token_ids": [[plain[7], plain[8]], [plain[3]]]},
        "allowed_token_ids": {"allowed_token_ids": sorted({*range(2, 2048)} - set(plain[:2]))},
        "json": {"structured_outputs": StructuredOutputsParams(json=SCHEMA), "ignore_eos": False},
        "regex": {
            "structured_outputs": StructuredOutputsParams(regex=r"[a-f]{3,8}-[0-9]{4,30}!"),
            "ignore_eos": False,
        },
    }


def answer(output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    logprobs = [
        {str(token): round(entry.logprob, 3) for token, entry in position.items()}
        for position in completion.logprobs or []
    ]
    return {
        "tokens": list(completion.token_ids),
        "finish": completion.finish_reason,
        "stop": completion.stop_reason,
        "logprobs": logprobs,
    }


def run(llm: Any, requests: list[tuple[dict[str, Any], Any]]) -> list[Any]:
    outputs: list[Any] = llm.generate(
        [prompt for prompt, _ in requests], [p for _, p in requests], use_tqdm=False
    )
    return outputs


def continuations(
    llm: Any, prompt: list[int], tokens: list[int], kwargs: dict[str, Any]
) -> list[dict[str, Any]]:
    """Each with the first `carried` of `tokens`, with the KV of the whole run at hand and without."""
    chosen = [g for g in sorted({*CARRIED, len(tokens) - 1}) if 0 < g < len(tokens)]
    keys = [{"carried": g, "cold": cold} for g in chosen for cold in (False, True)]
    requests = []
    for key in keys:
        inputs: dict[str, Any] = {"prompt_token_ids": prompt}
        if key["cold"]:
            inputs["cache_salt"] = f"{key}"
        requests.append((inputs, sampling(tokens[: key["carried"]], **kwargs)))
    return [key | answer(output) for key, output in zip(keys, run(llm, requests), strict=True)]


def main() -> None:
    llm = make_engine(sys.argv[1], sys.argv[2] == "async")
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    plain = [answer(output)["tokens"] for output in run(llm, [(prompt, sampling()) for prompt in prompts])]
    seen: dict[str, list[dict[str, Any]]] = {}
    for number, prompt in enumerate(PROMPTS):
        for name, kwargs in cases(plain[number]).items():
            (whole,) = run(llm, [({"prompt_token_ids": prompt}, sampling(**kwargs))])
            found = answer(whole)
            entry = {"whole": found, "continued": continuations(llm, prompt, found["tokens"], kwargs)}
            seen.setdefault(name, []).append(entry)
    seen_sampled = {
        "whole": sampled(llm, PROMPTS[0] + plain[0][:4], []),
        "continued": sampled(llm, PROMPTS[0], plain[0][:4]),
    }
    Path(sys.argv[3]).write_text(json.dumps({"cases": seen, "sampled": seen_sampled}))


def sampled(llm: Any, prompt: list[int], carried: list[int]) -> list[list[int]]:
    """Two tokens each at temperature 1: one that comes with the prompt, one out of verified drafts."""
    params = sampling(carried, temperature=1.0, max_tokens=len(carried) + 3)
    outputs = run(llm, [({"prompt_token_ids": prompt}, params)] * SAMPLES)
    return [answer(output)["tokens"][:2] for output in outputs]


if __name__ == "__main__":
    main()
