"""Scenario 14: every two of the parameters that may confuse prefill's leg, which makes one token only."""

import itertools
from typing import Any

from system.differential.case import Case

PARAMETERS: dict[str, dict[str, Any]] = {
    "min_tokens 20": {"min_tokens": 20},
    # It has an end all the same: the token of a line's end.
    "no limit": {"max_tokens": None, "stop_token_ids": [203]},
    "usage in a stream": {"stream": True, "stream_options": {"include_usage": True}},
    "nulls": {
        "stop": None,
        "seed": None,
        "logit_bias": None,
        "top_p": None,
        "min_p": None,
    },
    # With n > 1 vLLM refuses greedy sampling; one best token makes every sample the same.
    "n=3": {"n": 3, "temperature": 1.0, "top_k": 1},
    "prompt_logprobs": {"prompt_logprobs": 1},
}
_COMPLETION = PARAMETERS | {"logprobs": {"logprobs": 2}}
_CHAT = PARAMETERS | {
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "only max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 24},
}


def _pairs(route: str, base: dict[str, Any], parameters: dict[str, dict[str, Any]]) -> list[Case]:
    return [
        Case(
            f"{route}: {' and '.join(names)}",
            f"/v1/{route}",
            base | parameters[names[0]] | parameters[names[1]],
        )
        for names in itertools.combinations(parameters, 2)
        if names != ("no limit", "only max_completion_tokens")
    ]


CASES = [
    *_pairs(
        "completions",
        {
            "model": "pico",
            "prompt": "import os\n",
            "temperature": 0,
            "max_tokens": 24,
            "return_token_ids": True,
        },
        _COMPLETION,
    ),
    *_pairs(
        "chat/completions",
        {
            "model": "pico",
            "messages": [{"role": "user", "content": "Add two numbers."}],
            "temperature": 0,
            "max_tokens": 24,
            "return_token_ids": True,
        },
        _CHAT,
    ),
]
