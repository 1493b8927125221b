"""What is asked of the stack with small KV pools; sized in blocks of 128 tokens, of which a rank has 11."""

from typing import Any

from system.harness import completion_body
from system.prompts import prompts

POOL_BLOCKS = 11
"""Two prompts of five blocks, and the one that vLLM keeps back for the next speculative step."""

FILLING = [
    completion_body(prompt, max_tokens=40, ignore_eos=True)
    for prompt in prompts([580, 590, 592, 585], seed=90)
]
"""Five blocks each, the lookahead of the last step too: two of them fill a pool."""


def _growing(length: int, seed: int, **extra: Any) -> dict[str, Any]:
    (prompt,) = prompts([length], seed=seed)
    return completion_body(prompt, max_tokens=300, ignore_eos=True, **extra)


GROWING = [
    _growing(120, 91),
    _growing(129, 92, logprobs=1),
    _growing(118, 93, presence_penalty=0.4, frequency_penalty=0.2),
    _growing(125, 94, min_tokens=100, bad_words=["self"], logprobs=1),
    _growing(127, 95, repetition_penalty=1.2),
    _growing(121, 96, logprobs=1),
]
"""One block or two at first and four at last: of the six on a rank some lose theirs, and more than once."""

COMPACT_JSON = '{"backend": "xgrammar", "disable_any_whitespace": true}'
"""For --structured-outputs-config: left to itself pico puts blanks for ever where a schema allows them."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["argparse", "getopt", "optparse"]},
        "version": {"type": "integer", "minimum": 0, "maximum": 9},
        "readings": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 999},
            "minItems": 60,
            "maxItems": 60,
        },
        "tested": {"type": "boolean"},
    },
    "required": ["name", "version", "readings", "tested"],
    "additionalProperties": False,
}


def _json(length: int, seed: int) -> dict[str, Any]:
    (prompt,) = prompts([length], seed=seed)
    response_format = {"type": "json_schema", "json_schema": {"name": "readings", "schema": SCHEMA}}
    return completion_body(prompt, max_tokens=700, response_format=response_format)


JSON = [_json(120, 101), _json(126, 102), _json(123, 103)]
PLAIN = [_growing(119, 104), _growing(128, 105, logprobs=1), _growing(122, 106)]

REFERENCE: dict[str, dict[str, Any]] = {
    f"{name}-{number}": body
    for name, bodies in {"filling": FILLING, "growing": GROWING, "plain": PLAIN}.items()
    for number, body in enumerate(bodies)
}
