"""Scenario 8: ranks that sleep, woken by requests for one of them or for both.

That the first request ever may go to rank 1 needs a fresh stack: `tight_pools/test_8_first_request.py`.
"""

import asyncio
import time

import pytest
from system.harness import Stack, complete_all
from system.scenarios.bodies import K, greedy
from system.step_records import step_records

WAKE_LIMIT_S = 10.0
"""A tenth of it is usual; a group that does not wake would hang for ever."""


@pytest.mark.parametrize(
    "idle_s", [5.0, pytest.param(60.0, marks=[pytest.mark.full, pytest.mark.timeout(600)])]
)
async def test_wakes_after_a_pause(stack: Stack, idle_s: float) -> None:
    """After a time without requests and steps, rank 1 alone answers, after another rank 0, then both."""
    for number, ranks in enumerate((["1"], ["0"], ["1", "0"])):
        async with step_records(stack.decode.grpc_address) as log:
            await log.quiet()
            await asyncio.sleep(idle_s if number == 0 else 2.0)  # the pause that is tested
            assert not log.by_rank, "an idle group makes no steps"
            started = time.monotonic()
            answers = await asyncio.gather(
                *(
                    complete_all(
                        stack.url,
                        [greedy(150, seed=80 + 2 * number + int(rank), max_tokens=40)],
                        1,
                        {"X-data-parallel-rank": rank},
                    )
                    for rank in ranks
                )
            )
            assert time.monotonic() - started < WAKE_LIMIT_S
            await asyncio.to_thread(stack.wait_idle)
        assert [answer[0]["usage"]["completion_tokens"] for answer in answers] == [40] * len(ranks)
        log.check_lockstep(num_ranks=2, width=1 + K)
        worked = {str(rank) for rank in log.by_rank if any(not step.dummy for step in log.of(rank))}
        assert worked == set(ranks)
