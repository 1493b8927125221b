"""Our scheduler on the decode side of a stock NIXL push pair of plain vLLM servers (docs/stock-vllm.md)."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from system.harness import complete_all, completion_body, scrape
from system.prompts import prompts
from system.stock_pair import Pair, Router, run_pair

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

MAX_MODEL_LEN = 640
DECODE_BLOCKS = 12
"""11 of 128 tokens can be used: four requests of 2 blocks that grow to 4 do not fit."""


@pytest.fixture(autouse=True)
def nothing_left_over() -> None:
    """These tests do not use the shared stack."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with run_pair(tmp_path_factory.mktemp("pair"), MAX_MODEL_LEN, DECODE_BLOCKS) as running:
        yield running


async def _reference(pair: Pair, wanted: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Without transfer parameters the prefill server is plain vLLM, and answers by itself."""
    bodies = [completion_body(ids, max_tokens=max_tokens, ignore_eos=True) for ids in wanted]
    answers = await complete_all(pair.prefill_url, bodies, concurrency=len(bodies))
    return [answer["choices"][0]["token_ids"] for answer in answers]


def _prompt_tokens_by_source(url: str) -> dict[str, float]:
    series = scrape(url, "vllm:prompt_tokens_by_source_total")
    return {dict(labels)["source"]: value for labels, value in series.items()}


def _grown(pair: Pair, before: dict[str, float]) -> dict[str, float]:
    after = _prompt_tokens_by_source(pair.decode_url)
    return {source: value - before.get(source, 0.0) for source, value in after.items()}


async def test_outputs_equal_plain_vllm(pair: Pair) -> None:
    """Prompts at and around block edges; decode receives them, but for one token of each at most."""
    wanted = prompts([1, 2, 17, 127, 128, 129, 256, 300], seed=21)
    expected = await _reference(pair, wanted, 40)
    before = _prompt_tokens_by_source(pair.decode_url)
    choices = []
    for first in range(0, len(wanted), 2):
        choices += await asyncio.gather(
            *(Router(pair).complete(ids, 40) for ids in wanted[first : first + 2])
        )
    assert [choice["token_ids"] for choice in choices] == expected
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    grown = _grown(pair, before)
    assert grown["local_compute"] <= len(wanted)
    assert grown["local_compute"] + grown["external_kv_transfer"] == sum(map(len, wanted))


async def test_a_preempted_request_ends_so_that_the_caller_can_go_on(pair: Pair) -> None:
    """It says "abort" and "lockstep_preempted"; sent again with its tokens, the answer goes on exactly."""
    wanted = prompts([200, 210, 220, 230], seed=22)
    expected = await _reference(pair, wanted, 280)
    before = _prompt_tokens_by_source(pair.decode_url)
    attempts: list[list[dict[str, Any]]] = await asyncio.gather(
        *(Router(pair).complete_to_the_end(ids, 280) for ids in wanted)
    )
    tokens = [[t for choice in choices for t in choice["token_ids"]] for choices in attempts]
    assert tokens == expected
    bounced = [choice for choices in attempts for choice in choices[:-1]]
    assert bounced, "nothing was preempted"
    ends = {(choice["finish_reason"], choice["stop_reason"]) for choice in bounced}
    assert ends == {("abort", "lockstep_preempted")}
    assert [choices[-1]["finish_reason"] for choices in attempts] == ["length"] * len(wanted)
    # Nothing was computed anew on decode: one token of each attempt at most, as of its first.
    assert _grown(pair, before)["local_compute"] <= sum(map(len, attempts))
