"""`lockstep sim`: two node processes without engines, and the real proxy app over them."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from component.proxy.stack import Stack, completion_events, running, until
from component.sim.conftest import DECODE_STEP_MS, US_PER_ROW, US_PER_TOKEN, SimNode

PROMPT_TOKENS = 2000


@pytest.fixture
async def stack(sim_nodes: tuple[SimNode, SimNode]) -> AsyncIterator[Stack]:
    """A proxy over the module's two nodes."""
    prefill, decode = sim_nodes
    async with running([prefill], [decode], []) as stack:  # type: ignore[list-item]  # only addresses are read
        yield stack


async def first_token_s(stack: Stack, prompt: list[int]) -> float:
    """Until the first event of a streamed answer."""
    begun_s = time.monotonic()
    events = completion_events(stack, {"model": "pico", "prompt": prompt, "max_tokens": 1})
    async for _ in events:
        return time.monotonic() - begun_s
    raise AssertionError("no event came")


async def test_it_answers_over_the_openai_endpoint(stack: Stack) -> None:
    """With the text of the prompt over and over, to the limit that was asked for."""
    body = {"model": "pico", "prompt": "def f(x): return x", "max_tokens": 20, "ignore_eos": True}
    answer = (await stack.http.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["text"].startswith("def f(x): return xdef f(x): return x")
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 20


async def test_the_first_token_takes_as_long_as_its_uncached_tokens(stack: Stack) -> None:
    """A prompt that was computed before is in the prefix cache but for its last block."""
    prompt = [100 + index % 1000 for index in range(PROMPT_TOKENS)]
    cold_s, warm_s = await first_token_s(stack, prompt), await first_token_s(stack, prompt)
    assert cold_s >= PROMPT_TOKENS * US_PER_TOKEN / 1e6
    assert warm_s < cold_s - (PROMPT_TOKENS - 16) * US_PER_TOKEN / 1e6 / 2


async def test_decode_steps_slow_down_with_the_batch(stack: Stack) -> None:
    """Time an answer: 29 tokens after the first in steps of three, with one row on a rank and with six."""

    async def answer() -> None:
        body = {"model": "pico", "prompt": "a b c", "max_tokens": 31, "ignore_eos": True}
        assert (await stack.http.post("/v1/completions", json=body)).status_code == 200

    durations_s = []
    for concurrency in (1, 12):
        begun_s = time.monotonic()
        await asyncio.gather(*(answer() for _ in range(concurrency)))
        durations_s.append(time.monotonic() - begun_s)
    alone_s = 10 * (DECODE_STEP_MS + US_PER_ROW / 1e3) / 1e3
    with_six_s = 10 * (DECODE_STEP_MS + 6 * US_PER_ROW / 1e3) / 1e3
    assert durations_s[0] >= alone_s
    assert durations_s[1] >= with_six_s


async def test_it_is_a_real_node(stack: Stack) -> None:
    """It describes itself by what vLLM makes of its flags, counts full steps, and frees what is aborted."""
    _, decode = stack.prefill[0], stack.decode[0]
    node = stack.cluster.known("decode")[0]
    assert node.address == decode.address
    assert len(node.ranks) == 2
    status = await stack.client.flow.session(decode.address).status(5.0)  # type: ignore[union-attr]
    assert {count.mode for rank in status.ranks for count in rank.steps} == {"FULL"}
    body = {"model": "pico", "prompt": "a b c", "max_tokens": 1000, "ignore_eos": True}
    events = completion_events(stack, body)
    await anext(events)
    await events.aclose()
    await until(lambda: not stack.client.flow.num_in_flight, "the request ends")

    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        status = await stack.client.flow.session(decode.address).status(5.0)  # type: ignore[union-attr]
        if all(rank.load.kv_cache_usage == 0 and rank.load.num_running == 0 for rank in status.ranks):
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the aborted request still holds blocks")


async def test_a_simulated_model_has_no_logprobs(stack: Stack) -> None:
    """That is said, and nothing is made up."""
    body = {"model": "pico", "prompt": "a", "max_tokens": 2, "logprobs": 1}
    answer = await stack.http.post("/v1/completions", json=body)
    assert answer.status_code == 400
