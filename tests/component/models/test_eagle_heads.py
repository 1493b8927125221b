"""vLLM with each draft method and K = 0 to 3 continues as pico does, and takes drafts."""

from dataclasses import dataclass
from typing import Any

import pytest
from component.models.offline import continued_by_vllm
from pico_reference import PICO, first_not_greedy
from tokenizers import Tokenizer

DEADLINE_S = 400
COUNT = 96
PROMPTS = [
    "def add(a, b):\n",
    "import os\n\nclass Foo:\n",
    "<|user|>What does the function dump do?<|assistant|>",
    "for i in range(10):\n    print(",
    "class Parser:\n    def __init__(self, text):\n",
    "<|user|>Write a Python function mean: Return the mean of a list.<|assistant|>",
]

pytestmark = [pytest.mark.full, pytest.mark.timeout(DEADLINE_S + 60)]


@dataclass(frozen=True)
class Method:
    """A way to draft, and the share of its drafts that is accepted at least, by position."""

    name: str
    head: str | None
    accepted: tuple[float, float, float]


METHODS = [
    Method("mtp", None, (0.7, 0.5, 0.3)),
    Method("eagle", "pico_eagle", (0.3, 0.12, 0.04)),
    Method("eagle3", "pico_eagle3", (0.25, 0.08, 0.02)),
]


def flags(method: Method, num_speculative_tokens: int) -> dict[str, Any]:
    """Of one engine. vLLM's own GLM-4-MoE gives EAGLE-3 no inner states; the transformers backend's does."""
    config = {"method": method.name, "num_speculative_tokens": num_speculative_tokens}
    if method.head:
        config["model"] = str(PICO.with_name(method.head))
    backend = {"model_impl": "transformers"} if method.name == "eagle3" else {}
    return {"speculative_config": config if num_speculative_tokens else None} | backend


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_k_is_greedy_and_accepts_drafts(method: Method) -> None:
    """K = 0, 1, 2, 3: each token is pico's own first choice; the accepted share of the drafts at each
    position is at least the method's, so the head that was trained drafts, on the states that it knows.
    """
    tokenizer = Tokenizer.from_file(str(PICO / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in PROMPTS]
    answers = continued_by_vllm(PICO, [flags(method, k) for k in range(4)], COUNT, prompts, DEADLINE_S)
    for k, answer in enumerate(answers):
        for prompt, tokens in zip(prompts, answer["token_ids"], strict=True):
            assert len(tokens) == COUNT
            assert first_not_greedy(prompt, tokens) is None, (k, prompt, tokens)
        if k:
            drafts = answer["counters"]["vllm:spec_decode_num_drafts"]
            by_position = answer["counters"]["vllm:spec_decode_num_accepted_tokens_per_pos"]
            shares = [accepted / drafts for accepted in by_position]
            assert len(shares) == k
            assert all(s >= least for s, least in zip(shares, method.accepted, strict=False)), (k, shares)
