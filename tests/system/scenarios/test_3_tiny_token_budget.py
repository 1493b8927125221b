"""Scenario 3: budgets too small for a uniform step are refused by name, the smallest that fits works."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from system.harness import PICO, complete_all, free_port, run_stack
from system.kv_checks import kv_moves_and_returns
from system.scenarios.bodies import QUEUED, SMALL, K
from system.step_records import step_records

START_TIMEOUT_S = 120.0
"""Nothing is started: it is vLLM's import and its look at the configuration, twice at once on two cores."""


@pytest.fixture(autouse=True)
def nothing_left_over() -> None:
    """Instead of the scenarios' own: here no engine starts, and no KV moves."""


async def _refusal(*flags: str) -> tuple[int, str]:
    """Exit status and last line of `lockstep decode` with these flags."""
    speculative = json.dumps({"method": "mtp", "num_speculative_tokens": K})
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("lockstep")),
        *("decode", str(PICO), "--dtype", "float32", "--speculative-config", speculative),
        *("--host", "127.0.0.1", "--port", str(free_port()), "--http-port", str(free_port())),
        *("--side-channel-host", "127.0.0.1", "--side-channel-port", str(free_port()), *flags),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, errors = await asyncio.wait_for(process.communicate(), START_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        raise
    return process.returncode or 0, errors.decode().strip().splitlines()[-1]


async def test_too_small_ones_are_refused_by_name() -> None:
    """The flag, what it must be and why: 4 rows of 1 + K = 3 tokens need 12, a threshold of 2 clips them."""
    budget, threshold = await asyncio.gather(
        _refusal("--max-num-batched-tokens", "8", "--max-num-seqs", "4"),
        _refusal("--max-num-seqs", "4", "--long-prefill-token-threshold", "2"),
    )
    assert budget == (
        2,
        "lockstep decode: error: --max-num-batched-tokens: must be at least 12, which is --max-num-seqs 4 "
        "times 1 + K = 3 (got 8); give 12, or --max-num-seqs 2",
    )
    assert threshold[0] == 2
    assert threshold[1].startswith("lockstep decode: error: --long-prefill-token-threshold: ")
    assert "give 0" in threshold[1]


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_smallest_that_fits(
    tmp_path_factory: pytest.TempPathFactory, scenario_reference: dict[str, dict[str, Any]]
) -> None:
    """Decode with a budget of 12 for 4 requests, prefill with 8 tokens a step: the reference's answers."""
    flags = (
        "--prefill-arg=--max-num-batched-tokens=8",
        "--prefill-arg=--max-num-seqs=4",
        "--decode-arg=--max-num-batched-tokens=12",
        "--decode-arg=--max-num-seqs=4",
    )
    with run_stack(tmp_path_factory.mktemp("tiny"), *flags) as stack, kv_moves_and_returns(stack):
        async with step_records(stack.decode.grpc_address) as log:
            answers = await complete_all(stack.url, [*QUEUED, *SMALL], concurrency=11)
            await asyncio.to_thread(stack.wait_idle)
    names = [f"queued-{number}" for number in range(len(QUEUED))]
    names += [f"small-{number}" for number in range(len(SMALL))]
    for name, answer in zip(names, answers, strict=True):
        assert answer["choices"][0]["token_ids"] == scenario_reference[name]["choices"][0]["token_ids"], name
    log.check_lockstep(num_ranks=2, width=1 + K)
    assert max(step.rows for rank in log.by_rank for step in log.of(rank)) <= 4
