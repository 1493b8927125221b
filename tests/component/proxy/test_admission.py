"""How much the proxy takes on: the queue, the limits of each key, and the size of what it is sent."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from component.proxy.conftest import Start
from component.proxy.stack import Stack, refusals, until

ASK: dict[str, Any] = {"model": "pico", "max_tokens": 5}
WEB = {"Authorization": "Bearer sk-of-the-web-team-1"}
BATCH = {"Authorization": "Bearer sk-of-the-batch-jobs"}
KEYS = "web sk-of-the-web-team-1; batch sk-of-the-batch-jobs max_requests=1 tokens_per_minute=100"


def ask(stack: Stack, prompt_tokens: int = 20, **more: Any) -> "asyncio.Task[httpx.Response]":
    headers = more.pop("headers", {})
    body = {**ASK, "prompt": [7] * prompt_tokens, **more}
    return asyncio.create_task(stack.http.post("/v1/completions", json=body, headers=headers))


async def waiting(stack: Stack, choices: int) -> None:
    await until(lambda: stack.client.flow.num_queued == choices, f"{choices} wait")


@pytest.fixture
async def full(start: Start) -> Stack:
    """A queue with room for two choices and none for a request to be sent."""
    stack = await start("--prefill-window-tokens", "10", "--max-queued-requests", "2")
    stack.prefill[0].set.pause_after_tokens = 0
    stack.first = ask(stack)  # type: ignore[attr-defined]
    await until(lambda: stack.prefill[0].running, "the first is computed")
    return stack


def prompt_lengths(stack: Stack) -> list[int]:
    """In the order in which they were sent."""
    return [len(leg.request.prompt_token_ids or ()) for leg in stack.prefill[0].legs]


async def test_full_queue_refuses_at_once_and_says_when_to_come_back(full: Stack) -> None:
    """The client's library makes an error of it that it tries again by itself; those that wait go on."""
    tasks = [ask(full, 21), ask(full, 22)]
    await waiting(full, 2)
    refused = await ask(full, 23)
    assert refused.status_code == 503
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == (503, "Service Unavailable")
    assert refusals(full) == {"queue_full": 1}
    full.prefill[0].set.go.set()
    assert [(await task).status_code for task in tasks] == [200, 200]
    async with openai.AsyncOpenAI(base_url=f"{full.http.base_url}/v1", api_key="-", max_retries=0) as client:
        full.prefill[0].set.go.clear()
        tasks = [ask(full) for _ in range(3)]
        await waiting(full, 2)
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(**ASK, prompt="x")
    full.prefill[0].set.go.set()
    await asyncio.gather(*tasks)


async def test_a_request_is_as_many_as_its_choices(full: Stack) -> None:
    """`n` is no way around the limit."""
    refused = await ask(full, n=3)
    assert refused.status_code == 503
    assert full.client.flow.num_queued == 0
    full.prefill[0].set.go.set()
    assert (await ask(full, n=2)).status_code == 200


async def test_better_priority_is_sent_first(full: Stack) -> None:
    """vLLM's field and its header; lower is earlier."""
    tasks = [ask(full, 21), ask(full, 22, headers={"X-Vllm-Priority": "-1"})]
    await waiting(full, 2)
    full.prefill[0].set.go.set()
    await asyncio.gather(*tasks)
    assert prompt_lengths(full) == [20, 22, 21]


async def test_better_priority_displaces_the_last_of_a_worse_one(full: Stack) -> None:
    """So a flood of unimportant requests does not close the door to important ones."""
    first, last = ask(full, 21, priority=5), None
    await waiting(full, 1)
    last = ask(full, 22, priority=5)
    await waiting(full, 2)
    better = ask(full, 23, priority=1)
    displaced = await last
    assert displaced.status_code == 503
    assert int(displaced.headers["Retry-After"]) >= 1
    assert (await ask(full, 24, priority=5)).status_code == 503
    full.prefill[0].set.go.set()
    assert [(await task).status_code for task in (first, better)] == [200, 200]
    assert prompt_lengths(full) == [20, 23, 21]
    assert refusals(full) == {"displaced": 1, "queue_full": 1}


async def test_waiting_has_an_end(start: Start) -> None:
    """Of a request that was never sent; one that runs has its own deadline."""
    stack = await start("--prefill-window-tokens", "10", "--queue-timeout-s", "0.3")
    stack.prefill[0].set.pause_after_tokens = 0
    running = ask(stack)
    await until(lambda: stack.prefill[0].running, "the first is computed")
    late = await ask(stack)
    assert late.status_code == 503
    assert "Retry-After" in late.headers
    assert refusals(stack) == {"queue_timeout": 1}
    stack.prefill[0].set.go.set()
    assert (await running).status_code == 200


@pytest.fixture
async def keyed(start: Start, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """Two keys, one of them with limits; bodies of up to 4 KiB."""
    monkeypatch.setenv("LOCKSTEP_API_KEYS", KEYS)
    return await start("--max-body-bytes", "4096")


async def test_requests_of_one_key_are_limited_and_others_are_not_held_up(keyed: Stack) -> None:
    """A client that leaves gives its place back."""
    keyed.decode[0].set.pause_after_tokens = 0
    running = ask(keyed, headers=BATCH)
    await until(lambda: keyed.decode[0].running, "one runs")
    refused = await ask(keyed, headers=BATCH)
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
    assert refused.json()["error"]["type"] == "rate_limit_error"
    other = ask(keyed, headers=WEB)
    await until(lambda: len(keyed.decode[0].running) == 2, "the other key's runs too")
    running.cancel()
    await until(lambda: len(keyed.decode[0].running) == 1, "the first is gone")
    keyed.decode[0].set.go.set()
    assert (await ask(keyed, headers=BATCH)).status_code == 200
    assert (await other).status_code == 200


async def test_tokens_of_a_key_are_limited(keyed: Stack) -> None:
    """Prompt and answer count; the other key has its own."""
    assert (await ask(keyed, 96, headers=BATCH)).status_code == 200
    refused = await ask(keyed, 5, headers=BATCH)
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["Retry-After"]) <= 2
    assert "tokens a minute" in refused.json()["error"]["message"]
    assert (await ask(keyed, 96, headers=WEB)).status_code == 200
    assert refusals(keyed) == {"key_tokens": 1}


async def test_client_of_a_key_cannot_ask_for_more_than_its_priority(keyed: Stack) -> None:
    """Otherwise everybody would be the most important."""
    assert (await ask(keyed, headers=WEB, priority=-9)).status_code == 200
    assert keyed.prefill_leg().priority == 0
    assert (await ask(keyed, headers=WEB, priority=9)).status_code == 200
    assert keyed.prefill_leg().priority == 9


async def pieces(size: int, count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b" " * size


async def test_body_over_the_limit_is_refused_however_it_comes(keyed: Stack) -> None:
    """By its length, or by what has come where there is none; and the service goes on."""
    whole = await keyed.http.post("/v1/completions", content=b" " * 4097, headers=WEB)
    chunked = await keyed.http.post("/v1/completions", content=pieces(1000, 20), headers=WEB)
    for answer in (whole, chunked):
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
    claude = await keyed.http.post("/v1/messages", content=b" " * 4097, headers=WEB)
    assert claude.json()["error"]["type"] == "request_too_large"
    assert refusals(keyed) == {"body_size": 3}
    fits = await keyed.http.post("/v1/completions", content=pieces(1000, 4), headers=WEB)
    assert fits.status_code == 400  # no JSON
    assert (await ask(keyed, headers=WEB)).status_code == 200


async def test_bodies_of_requests_in_progress_are_limited_in_all(keyed: Stack) -> None:
    """Sixteen of the largest; a request's end makes room."""
    keyed.decode[0].set.pause_after_tokens = 0
    large = {"headers": WEB, "user": "x" * 3900}
    tasks = [ask(keyed, 4, **large) for _ in range(16)]
    await until(lambda: len(keyed.decode[0].running) == 16, "sixteen run")
    refused = await ask(keyed, 4, **large)
    assert refused.status_code == 503
    assert refused.headers["Retry-After"] == "1"
    assert refusals(keyed) == {"bodies": 1}
    keyed.decode[0].set.go.set()
    assert {(await task).status_code for task in tasks} == {200}
    assert (await ask(keyed, 4, **large)).status_code == 200


async def test_header_that_means_nothing_or_two_things(stack: Stack) -> None:
    """What is wrong is named."""
    wrong: list[tuple[list[tuple[str, str]], str]] = [
        ([("X-Request-Id", "a b")], "X-Request-Id"),
        ([("X-Request-Id", "a"), ("X-Request-Id", "b")], "x-request-id"),
        ([("X-Vllm-Priority", "high")], "X-Vllm-Priority"),
    ]
    for headers, named in wrong:
        answer = await stack.http.post("/v1/completions", json={**ASK, "prompt": "x"}, headers=headers)
        assert answer.status_code == 400
        assert named in answer.json()["error"]["message"]
    assert refusals(stack) == {"header": len(wrong)}


async def test_request_id_of_the_body_cannot_forge_a_line_of_the_log(stack: Stack) -> None:
    """vLLM takes it from there too."""
    body = {**ASK, "prompt": "x", "request_id": "a\nINFO all is well"}
    answer = await stack.http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")
