"""Scenario 15: bad requests, fifty times each, among good ones."""

import asyncio
from typing import Any

import httpx
import msgspec
from system.differential.answer import Answer, answer_all
from system.differential.case import Case
from system.differential.groups import GROUPS
from system.harness import Stack, complete_all
from system.scenarios.bodies import QUEUED

from lockstep.status import STATUS_PATH, StatusDocument

TIMES = 50
CONCURRENCY = 16
_NAMED = (
    "{'model': 'nope'}",
    "{'temperature': -1}",
    ": not JSON",
    "{'prompt': [5, 5,",
    "{'max_tokens': 5000}",
)


def bad_requests() -> list[Case]:
    """Unknown model, bad parameter, no JSON, too long; on two routes, as a stream and not."""
    cases = [
        case
        for case in GROUPS["refused"]
        if any(name in case.name for name in _NAMED)
        and case.path in ("/v1/completions", "/v1/chat/completions")
    ]
    assert len(cases) >= 10
    return cases


async def test_each_is_plain_vllms_refusal_every_time(
    stack: Stack,
    differential_reference: dict[str, Answer],
    scenario_reference: dict[str, dict[str, Any]],
) -> None:
    """Status and body to the letter; the good ones are not disturbed, no leg is sent, no node marked down."""
    before = await document(stack)

    async def refused() -> None:
        for _ in range(TIMES):
            answers = await answer_all(stack.url, bad_requests(), CONCURRENCY)
            for name, answer in answers.items():
                assert answer == differential_reference[name], name

    good, _ = await asyncio.gather(complete_all(stack.url, QUEUED, 2), refused())
    for number, answer in enumerate(good):
        expected = scenario_reference[f"queued-{number}"]["choices"][0]["token_ids"]
        assert answer["choices"][0]["token_ids"] == expected
    after = await document(stack)
    assert [(node.address, node.state) for node in after.nodes] == [
        (node.address, "live") for node in before.nodes
    ]
    attempts = {
        reason: count - before.proxy.attempts_by_reason[reason]
        for reason, count in after.proxy.attempts_by_reason.items()
    }
    assert {reason: count for reason, count in attempts.items() if count} == {"first": len(QUEUED)}


async def document(stack: Stack) -> StatusDocument:
    async with httpx.AsyncClient(base_url=stack.url, timeout=20) as client:
        answer = await client.get(STATUS_PATH)
    return msgspec.json.decode(answer.content, type=StatusDocument)
