"""Each draft method on a stack of its own: lockstep on both ranks, greedy tokens, drafts taken, KV moved.

MTP with K = 2 is what the shared stack has, so it is not here.
"""

import asyncio
import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
from pico_reference import PICO, first_not_greedy
from system.harness import Stack, complete_all, completion_body, run_stack
from system.prompts import prompts
from system.step_records import StepLog, step_records

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

LENGTHS = [2, 5, 17, 40, 90, 127, 128, 129, 150, 200, 256, 257, 300, 330, 384, 400]
BLOCK_TOKENS = 128
KV_BYTES_PER_TOKEN_AND_LAYER = 2 * 2 * 64 * 4
"""Keys and values of 2 heads of 64, float32; a draft layer has the same."""


@dataclass(frozen=True)
class Method:
    """A way to draft, the layers whose KV moves, and the least share of drafts that is accepted."""

    name: str
    num_speculative_tokens: int
    layers: int = 5
    accepted: float = 0.0
    head: str | None = None
    model_impl: str = "auto"

    def flags(self) -> list[str]:
        """Of `lockstep up`, whose own option knows MTP only."""
        if self.head is None:
            return ["--num-speculative-tokens", str(self.num_speculative_tokens)]
        config = {"method": self.name, "num_speculative_tokens": self.num_speculative_tokens}
        config |= {"model": str(PICO.with_name(self.head))}
        engine = ["--speculative-config", json.dumps(config), "--model-impl", self.model_impl]
        given = [f"--{role}-arg={argument}" for role in ("prefill", "decode") for argument in engine]
        return ["--num-speculative-tokens", "0", *given]


METHODS = [
    Method("none", 0, layers=4),
    Method("mtp", 1, accepted=0.7),
    Method("mtp", 3, accepted=0.5),
    Method("eagle", 2, accepted=0.25, head="pico_eagle"),
    # vLLM's own GLM-4-MoE gives EAGLE-3 no inner states; the transformers backend's does.
    Method("eagle3", 2, accepted=0.2, head="pico_eagle3", model_impl="transformers"),
]


@dataclass(frozen=True)
class Run:
    """What one stack did with the prompts."""

    method: Method
    prompts: list[list[int]]
    answers: list[dict[str, Any]]
    steps: StepLog
    drafts: dict[str, float]
    accepted: dict[str, float]
    pushed_bytes: float


@pytest.fixture(autouse=True)
def nothing_left_over() -> None:
    """In place of the check of the shared stack, which these tests do not start."""


@pytest.fixture(
    scope="module", params=METHODS, ids=lambda method: f"{method.name}-{method.num_speculative_tokens}"
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One stack for the tests of a method; it has stopped when they run."""
    method: Method = request.param
    with run_stack(tmp_path_factory.mktemp(method.name), *method.flags()) as stack:
        result = asyncio.run(_run(stack, method))
        stack.wait_idle()
    return result


async def _run(stack: Stack, method: Method) -> Run:
    asked = prompts(LENGTHS, seed=7)
    names = ("lockstep_draft_tokens_total", "lockstep_accepted_tokens_total")
    before = [stack.decode.by_rank(name) for name in names]
    pushed_before = sum(stack.prefill.by_rank("lockstep_kv_pushed_bytes_total").values())
    async with step_records(stack.decode.grpc_address) as steps:
        bodies = [completion_body(prompt, max_tokens=48, ignore_eos=True) for prompt in asked]
        answers = await complete_all(stack.url, bodies, concurrency=8)
        await asyncio.to_thread(stack.wait_idle)
    drafts, accepted = (
        {rank: value - old.get(rank, 0.0) for rank, value in stack.decode.by_rank(name).items()}
        for name, old in zip(names, before, strict=True)
    )
    pushed = sum(stack.prefill.by_rank("lockstep_kv_pushed_bytes_total").values()) - pushed_before
    return Run(method, asked, answers, steps, drafts, accepted, pushed)


def test_every_step_of_both_ranks_is_full(run: Run) -> None:
    """Dummy steps too, 1 + K tokens a row, the same on both ranks."""
    run.steps.check_lockstep(num_ranks=2, width=1 + run.method.num_speculative_tokens)


def test_tokens_are_what_pico_says(run: Run) -> None:
    """Each is the first choice of pico's own network after all before it, as without speculation."""
    for prompt, answer in zip(run.prompts, run.answers, strict=True):
        tokens = answer["choices"][0]["token_ids"]
        assert len(tokens) == 48
        assert first_not_greedy(prompt, tokens) is None, (len(prompt), tokens)


def test_drafts_are_accepted_on_both_ranks(run: Run) -> None:
    """At least the method's share of them; without speculation there are none."""
    if run.method.num_speculative_tokens == 0:
        assert not any(run.drafts.values())
        return
    assert set(run.drafts) == {"0", "1"}
    for rank, drafts in run.drafts.items():
        assert run.method.accepted <= run.accepted[rank] / drafts <= 1.0, (rank, run.drafts, run.accepted)


def test_kv_of_the_draft_layer_moves_too(run: Run) -> None:
    """Bytes pushed are the prompts' blocks over pico's four layers and the drafter's one."""
    blocks = sum(math.ceil(length / BLOCK_TOKENS) for length in LENGTHS)
    per_block = run.method.layers * KV_BYTES_PER_TOKEN_AND_LAYER * BLOCK_TOKENS
    assert run.pushed_bytes == blocks * per_block
