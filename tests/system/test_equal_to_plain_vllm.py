"""What clients get is what plain vLLM gives, though every prompt's KV was pushed from the prefill node."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from system.harness import Stack, complete_all


def _token_ids(answer: dict[str, Any]) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


@pytest.mark.parametrize(("concurrency", "every"), [(1, 3), (8, 1)])
async def test_token_ids_equal(
    stack: Stack, bodies: list[dict[str, Any]], reference: list[dict[str, Any]], concurrency: int, every: int
) -> None:
    """48 greedy prompts of 2 to 400 tokens, 16 of them alone: equal token ids, text, finish reason, usage."""
    bodies, reference = bodies[::every], reference[::every]
    pushed_before = sum(stack.prefill.by_rank("lockstep_kv_pushed_bytes_total").values())
    answers = await complete_all(stack.url, bodies, concurrency)
    assert [_token_ids(answer) for answer in answers] == [_token_ids(answer) for answer in reference]
    for answer, expected in zip(answers, reference, strict=True):
        for field in ("text", "finish_reason", "stop_reason"):
            assert answer["choices"][0][field] == expected["choices"][0][field]
        for field in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert answer["usage"][field] == expected["usage"][field]
    stack.wait_idle()
    assert sum(stack.prefill.by_rank("lockstep_kv_pushed_bytes_total").values()) > pushed_before


async def test_streamed_text_equals_unstreamed(stack: Stack, reference: list[dict[str, Any]]) -> None:
    """The pieces of a stream put together are the text of the plain answer."""
    prompt = "def parse_args(self, args=None):\n"
    body = {"model": "pico", "prompt": prompt, "temperature": 0, "max_tokens": 64}
    async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:
        whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        pieces = []
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    pieces.append(json.loads(line[6:])["choices"][0]["text"])
    assert len(pieces) > 1
    assert "".join(pieces) == whole


async def test_same_request_id_on_two_prompts(
    stack: Stack, bodies: list[dict[str, Any]], reference: list[dict[str, Any]]
) -> None:
    """Two prompts at once under one X-Request-Id get their own right answers."""
    chosen = [20, 29]
    headers = {"X-Request-Id": "twice-the-same"}
    async with httpx.AsyncClient(base_url=stack.url, timeout=120, headers=headers) as client:
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=bodies[number]) for number in chosen)
        )
    assert [_token_ids(answer.json()) for answer in answers] == [_token_ids(reference[n]) for n in chosen]
