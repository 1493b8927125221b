"""The hand-off on real engines: prefill's token goes out, and decode goes on from it with real drafts."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from system.harness import Stack, complete_all, completion_body, scrape
from system.prompts import prompts
from system.servers import run_proxy
from system.streams import stream_completion


@pytest.fixture(scope="module")
def hand_off_off_url(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One more proxy over the shared nodes, which takes every token from decode."""
    directory = tmp_path_factory.mktemp("hand_off_off")
    with run_proxy([stack.prefill], [stack.decode], directory, "--hand-off", "off") as url:
        yield url


def decode_total(stack: Stack, name: str) -> float:
    return sum(stack.decode.by_rank(name).values())


async def test_decode_begins_with_more_than_a_token(stack: Stack) -> None:
    """The first chunk is prefill's token, the second is what decode's first step gives.

    Where the client was not quick enough, both have come as one.
    """
    before = decode_total(stack, "lockstep_decode_hand_offs_total")
    bodies = [completion_body(prompt) for prompt in prompts([20, 60, 128, 129, 200, 300] * 2, seed=21)]
    async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:
        streams = [await stream_completion(client, body) for body in bodies]
    first_steps = [stream.chunk_sizes[1] for stream in streams if stream.chunk_sizes[0] == 1]
    assert len(first_steps) > len(streams) / 2
    assert sum(first_steps) / len(first_steps) > 1.5
    stack.wait_idle()
    assert decode_total(stack, "lockstep_decode_hand_offs_total") - before == len(bodies)


async def test_first_tokens_do_not_wait_for_the_drafts(stack: Stack) -> None:
    """All are told within their step, but for those with logprobs and of answers that end with them."""

    def early() -> float:
        return sum(scrape(stack.url, "lockstep_proxy_early_first_tokens_total").values())

    before = early()
    some = prompts([20, 128, 300, 700] * 2, seed=24)
    await complete_all(stack.url, [completion_body(prompt) for prompt in some], 4)
    assert early() - before == len(some)
    others = [completion_body(some[0], max_tokens=1), completion_body(some[1], logprobs=1)]
    await complete_all(stack.url, others, 2)
    assert early() - before == len(some)


async def test_no_arrival_is_padded(stack: Stack) -> None:
    """All of the K drafts of each first row are prefill's."""
    names = ("lockstep_decode_padded_arrivals_total", "lockstep_decode_placeholder_drafts_total")
    before = {name: decode_total(stack, name) for name in names}
    await complete_all(stack.url, [completion_body(p) for p in prompts([20, 60, 200] * 4, seed=22)], 8)
    stack.wait_idle()
    assert decode_total(stack, names[0]) == before[names[0]]


@pytest.mark.parametrize(
    "extra",
    [
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
        {"min_tokens": 6, "max_tokens": 12},
        {"logprobs": 3},
        {"structured_outputs": {"regex": "[a-z]{3} [0-9]{4}"}},
        {"stop_token_ids": list(range(100, 200))},
    ],
    ids=lambda extra: next(iter(extra)),
)
async def test_answers_equal_those_without(
    stack: Stack, hand_off_off_url: str, extra: dict[str, Any]
) -> None:
    """Everything that counts output tokens counts the one that was handed over."""
    bodies = [completion_body(prompt, **extra) for prompt in prompts([20, 60, 128, 200], seed=23)]
    with_it = await complete_all(stack.url, bodies, 4)
    without = await complete_all(hand_off_off_url, bodies, 4)
    for ours, theirs in zip(with_it, without, strict=True):
        (choice,), (expected,) = ours["choices"], theirs["choices"]
        for field in ("token_ids", "text", "finish_reason", "stop_reason"):
            assert choice[field] == expected[field]
        assert ours["usage"] == theirs["usage"]
        if expected["logprobs"]:
            for field in ("tokens", "text_offset"):
                assert choice["logprobs"][field] == expected["logprobs"][field]
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(
                expected["logprobs"]["token_logprobs"], abs=1e-3
            )
