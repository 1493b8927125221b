"""The prompts that the stack and plain vLLM answer: text of the kind pico was trained on, as token ids."""

import argparse
import inspect

from system.harness import PICO
from tokenizers import Tokenizer

LENGTHS = [
    2,
    3,
    4,
    5,
    6,
    8,
    11,
    16,
    23,
    32,
    45,
    64,
    90,
    100,
    120,
    126,
    127,
    128,
    129,
    130,
    150,
    200,
    255,
    256,
]
LENGTHS += [257, 300, 350, 383, 384, 385, 399, 400]
"""Tokens; 128 is the CPU block size, so block edges are among them."""


def prompts(lengths: list[int], seed: int) -> list[list[int]]:
    """One prompt for each length; other seeds give other prompts, with no common prefix of a block."""
    ids = Tokenizer.from_file(str(PICO / "tokenizer.json")).encode(inspect.getsource(argparse)).ids
    stride = 421
    start = seed * 7919
    chosen = []
    for number, length in enumerate(lengths):
        offset = (start + number * stride) % (len(ids) - max(lengths))
        chosen.append(ids[offset : offset + length])
    return chosen
