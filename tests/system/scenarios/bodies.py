"""What the scenarios ask: the requests whose answers plain vLLM gives beforehand."""

from typing import Any

from system.harness import completion_body
from system.prompts import prompts
from system.scenarios.tight_pools import bodies as tight_bodies

K = 2
"""Speculative tokens of the stacks and of the reference."""
BLOCK_TOKENS = 128
"""vLLM's KV block on a CPU."""
CONTEXT_LIMIT_TOKENS = 4096 - 2 * K - 1
"""Served context of a default stack: pico's own limit less K for each of 2 batches in flight, less 1."""


def greedy(length: int, seed: int, max_tokens: int, **extra: Any) -> dict[str, Any]:
    """A completion that goes on to its limit."""
    (prompt,) = prompts([length], seed=seed)
    return completion_body(prompt, max_tokens=max_tokens, ignore_eos=True, **extra)


AT_THE_LIMIT = {
    room: greedy(CONTEXT_LIMIT_TOKENS - room, seed=40 + room, max_tokens=64, logprobs=1)
    for room in range(1, K + 3)
}
"""By the tokens that are left for the answer."""
LONG = greedy(40, seed=50, max_tokens=700)
QUEUED = [greedy(20 + number, seed=51, max_tokens=24) for number in range(6)]
SMALL = [greedy(length, seed=52, max_tokens=K + 2) for length in (3, 127, 128, 129, 257)]
_EDGES = [1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, *(3 * BLOCK_TOKENS - j for j in range(K + 2))]
AROUND_A_BLOCK = {
    length: greedy(length, seed=90 + number, max_tokens=24) for number, length in enumerate(_EDGES)
}
"""By the prompt's length in tokens."""

REFERENCE: dict[str, dict[str, Any]] = {
    **{f"limit-{room}": body for room, body in AT_THE_LIMIT.items()},
    "long": LONG,
    **{f"queued-{number}": body for number, body in enumerate(QUEUED)},
    **{f"small-{number}": body for number, body in enumerate(SMALL)},
    **{f"block-{length}": body for length, body in AROUND_A_BLOCK.items()},
    **tight_bodies.REFERENCE,
}
"""By name; `scenario_reference` has the answers under the same names."""
