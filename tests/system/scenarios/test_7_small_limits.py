"""Scenario 7: answers of one token to 1 + K."""

import itertools
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from system.harness import Stack, complete_all
from system.scenarios.bodies import SMALL, K
from system.streams import stream_completion

LIMITS = sorted({1, 2, K, K + 1})


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_exactly_so_many_tokens(
    stack: Stack, scenario_reference: dict[str, dict[str, Any]], streamed: bool
) -> None:
    """The reference's first tokens, none twice or too many, wherever in a block a prompt ends; usage."""
    asked = list(itertools.product(LIMITS, range(len(SMALL))))
    bodies = [SMALL[number] | {"max_tokens": limit} for limit, number in asked]
    expected = [
        scenario_reference[f"small-{number}"]["choices"][0]["token_ids"][:limit] for limit, number in asked
    ]
    if streamed:
        async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
            streams = [await stream_completion(client, body) for body in bodies]
        assert all(stream.done and stream.error is None for stream in streams)
        found = [(stream.token_ids, stream.finish_reason, stream.usage) for stream in streams]
    else:
        answers = await complete_all(stack.url, bodies, concurrency=4)
        found = [
            (answer["choices"][0]["token_ids"], answer["choices"][0]["finish_reason"], answer["usage"])
            for answer in answers
        ]
    assert [token_ids for token_ids, _, _ in found] == expected
    assert {finish_reason for _, finish_reason, _ in found} == {"length"}
    for (limit, _), body, (_, _, usage) in zip(asked, bodies, found, strict=True):
        assert usage is not None
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(body["prompt"]), limit)
        assert usage["total_tokens"] == len(body["prompt"]) + limit


@pytest.mark.parametrize("limit", LIMITS)
async def test_chat(stack: Stack, limit: int) -> None:
    """A chat's stream counts and spells what the whole answer does."""
    request: dict[str, Any] = {
        "model": "pico",
        "messages": [{"role": "user", "content": "Write a loop."}],
        "temperature": 0,
        "max_completion_tokens": limit,
        "extra_body": {"ignore_eos": True},
    }
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(**request)
        stream = await client.chat.completions.create(
            **request, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    assert whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == limit
