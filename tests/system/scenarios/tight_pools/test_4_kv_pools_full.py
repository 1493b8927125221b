"""Scenario 4: more transfers than the decode pool has blocks for."""

import asyncio
from typing import Any

import pytest
from system.harness import Stack, complete_all
from system.scenarios.bodies import K
from system.scenarios.tight_pools.bodies import FILLING
from system.step_records import step_records

DEADLINE_S = 60.0
"""Some 5 s are usual. What must not happen is to wait for good."""


@pytest.mark.parametrize("ranks", [["1"], ["0", "1"]], ids=["one rank", "both ranks"])
async def test_four_where_two_fit(
    tight: Stack, scenario_reference: dict[str, dict[str, Any]], ranks: list[str]
) -> None:
    """Four prompts at once on a rank, of which two fill its pool exactly: all finish, with the right tokens.

    None has to go back to prefill: what decode admits, it has room for. Where prefill is slow, a rank that
    stands still may give blocks up that nothing was computed for ("revoked").
    """
    again_before = _attempts_after_the_first(tight)
    async with step_records(tight.decode.grpc_address) as log:
        answers = await asyncio.wait_for(
            asyncio.gather(
                *(complete_all(tight.url, FILLING, 4, {"X-data-parallel-rank": rank}) for rank in ranks)
            ),
            DEADLINE_S,
        )
        await asyncio.to_thread(tight.wait_idle)
    expected = [
        scenario_reference[f"filling-{number}"]["choices"][0]["token_ids"] for number in range(len(FILLING))
    ]
    for of_rank in answers:
        assert [answer["choices"][0]["token_ids"] for answer in of_rank] == expected
    log.check_lockstep(num_ranks=2, width=1 + K)
    together = [max(step.rows for step in log.of(int(rank)) if not step.dummy) for rank in ranks]
    assert max(together) <= 2, "more rows than the pool can hold"
    assert _attempts_after_the_first(tight) == again_before


def _attempts_after_the_first(stack: Stack) -> float:
    attempts = stack.node("proxy").metric("lockstep_proxy_attempts_total")
    left_out = {("reason", "first"), ("reason", "revoked")}
    return sum(value for labels, value in attempts.items() if not left_out.intersection(labels))
