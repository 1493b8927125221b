"""Scenario 8, its first part: the first request ever goes to rank 1. So it is the first on this stack."""

import asyncio

from system.harness import Stack, complete_all
from system.scenarios.bodies import K
from system.scenarios.tight_pools.bodies import FILLING
from system.step_records import step_records


async def test_wakes_rank_1(tight: Stack) -> None:
    """It is answered in time, and both ranks are in lockstep from the first step on."""
    proxy = tight.node("proxy")
    assert not sum(proxy.metric("lockstep_proxy_requests_total").values()), "there was one before"
    async with step_records(tight.decode.grpc_address) as log:
        (answer,) = await asyncio.wait_for(
            complete_all(tight.url, FILLING[:1], 1, {"X-data-parallel-rank": "1"}), timeout=20
        )
        await asyncio.to_thread(tight.wait_idle)
    assert answer["usage"]["completion_tokens"] == 40
    log.check_lockstep(num_ranks=2, width=1 + K)
    assert all(step.dummy for step in log.of(0))
    assert any(not step.dummy for step in log.of(1))
