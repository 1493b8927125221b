"""Prompts of many chunks, on a stack whose prefill takes two blocks a step."""

from pathlib import Path

import pytest
from system.harness import run_stack
from system.streamed_push import blocks_of, push_long_prompts

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

LENGTHS = [1000, 2100, 3300, 3900, 2049, 513, 100]
STEP_TOKENS = 256


@pytest.fixture(autouse=True)
def nothing_left_over() -> None:
    """In place of the check of the shared stack, which this test does not start."""


async def test_prompts_of_many_chunks(tmp_path: Path) -> None:
    """Four at a time: most writes go out in mid-prompt, each block once, and the answers are pico's."""
    flags = [f"--prefill-arg={flag}" for flag in ("--max-num-batched-tokens", str(STEP_TOKENS))]
    with run_stack(tmp_path, *flags) as stack:
        counted = await push_long_prompts(stack, LENGTHS, seed=54)
    assert counted["pushed_blocks"] == counted["received_blocks"] == blocks_of(LENGTHS)
    # Some chunks go together where decode registers late, so their number is not fixed.
    assert counted["streamed_chunks"] >= sum(LENGTHS) / STEP_TOKENS / 2
    assert counted["pushed_chunks"] <= counted["streamed_chunks"] + len(LENGTHS)
