"""What pico's own network, in plain PyTorch, says of token ids that an engine gave."""

import importlib
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

PICO = Path(__file__).parents[1] / "models" / "pico"
SAME_LOGIT = 1e-3
"""Two engines' sums differ by 1e-5 or so; a token this close to the best is a tie that either may win."""


def script(name: str) -> Any:
    """A module of models/pico, which is a folder of scripts and no package."""
    sys.path.insert(0, str(PICO))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(PICO))


@cache
def network() -> Any:
    return script("pico_checkpoint").load(PICO)


@torch.no_grad()
def first_not_greedy(prompt: list[int], answer: list[int]) -> int | None:
    """Index in `answer` of the first token that is not pico's first choice after all before it, if any."""
    model = network()
    logits = model.logits(model.states(torch.tensor([prompt + answer])))[0, len(prompt) - 1 : -1]
    behind = logits.max(-1).values - logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]
    wrong = (behind > SAME_LOGIT).nonzero()
    return int(wrong[0]) if len(wrong) else None
