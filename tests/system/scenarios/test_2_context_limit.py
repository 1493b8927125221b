"""Scenario 2: prompts that leave 1 to K + 2 tokens below the context limit."""

import asyncio
from typing import Any

import httpx
import pytest
from system.harness import Stack, complete_all
from system.scenarios.bodies import AT_THE_LIMIT, CONTEXT_LIMIT_TOKENS, LONG, QUEUED, K, greedy
from system.step_records import step_records
from system.streams import Stream, running_stream
from system.waiting import until

Answers = dict[str, dict[str, Any]]


async def test_answers_end_at_the_limit(stack: Stack, scenario_reference: Answers) -> None:
    """While the other rank runs a long request: exact lengths, tokens and logprobs; all steps are FULL.

    The short requests behind them on their rank finish too.
    """
    stream = Stream()
    async with (
        step_records(stack.decode.grpc_address) as log,
        httpx.AsyncClient(base_url=stack.url, timeout=120) as client,
    ):
        async with running_stream(client, LONG | {"max_tokens": 4000}, stream, {"X-data-parallel-rank": "0"}):
            await until(lambda: len(stream.token_ids) >= 10, "the other rank decodes", timeout_s=30)
            bodies = [*AT_THE_LIMIT.values(), *QUEUED]
            answers = await complete_all(stack.url, bodies, len(bodies), {"X-data-parallel-rank": "1"})
            assert not stream.done
        await asyncio.to_thread(stack.wait_idle)
    for room, answer in zip(AT_THE_LIMIT, answers, strict=False):
        _check_at_limit(answer, scenario_reference[f"limit-{room}"], room)
    for number, answer in enumerate(answers[len(AT_THE_LIMIT) :]):
        assert answer["choices"][0]["token_ids"] == _ids(scenario_reference[f"queued-{number}"])
    long = _ids(scenario_reference["long"])
    assert stream.token_ids[: len(long)] == long[: len(stream.token_ids)]
    log.check_lockstep(num_ranks=2, width=1 + K)


def _check_at_limit(answer: dict[str, Any], expected: dict[str, Any], room: int) -> None:
    choice, same = answer["choices"][0], expected["choices"][0]
    assert choice["finish_reason"] == same["finish_reason"] == "length"
    assert choice["token_ids"] == same["token_ids"]
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == room
    assert answer["usage"]["total_tokens"] == CONTEXT_LIMIT_TOKENS
    assert len(choice["logprobs"]["token_logprobs"]) == room
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(same["logprobs"]["token_logprobs"], abs=2e-3)
    assert choice["logprobs"]["tokens"] == same["logprobs"]["tokens"]


async def test_generation_runs_up_to_the_limit(stack: Stack) -> None:
    """Rows that come to the limit by decoding, two on each rank, end on it and stay 1 + K wide to the end."""
    bodies = [
        greedy(CONTEXT_LIMIT_TOKENS - room, seed=70 + room, max_tokens=400) for room in (30, 31, 32, 33)
    ]
    async with step_records(stack.decode.grpc_address) as log:
        answers = await complete_all(stack.url, bodies, concurrency=4)
        await asyncio.to_thread(stack.wait_idle)
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [30, 31, 32, 33]
    assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["length"] * 4
    log.check_lockstep(num_ranks=2, width=1 + K)


async def test_no_room_is_refused(stack: Stack) -> None:
    """A prompt that fills the context, or is longer, gets a 400 as from plain vLLM; a shorter one a token."""
    (answer,) = await complete_all(stack.url, [AT_THE_LIMIT[1] | {"max_tokens": 1}], 1)
    assert answer["usage"]["completion_tokens"] == 1
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
        for length, why in (
            (CONTEXT_LIMIT_TOKENS, "max_tokens must be at least 1, got 0"),
            (CONTEXT_LIMIT_TOKENS + 1, f"maximum context length is {CONTEXT_LIMIT_TOKENS} tokens"),
        ):
            refused = await client.post("/v1/completions", json=greedy(length, seed=75, max_tokens=1))
            assert refused.status_code == 400, refused.text
            assert why in refused.json()["error"]["message"]


def _ids(answer: dict[str, Any]) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids
