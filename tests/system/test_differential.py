"""The whole API gives what plain vLLM gives: every case of `differential/` goes to both and is compared.

Both are sent 8 requests at a time, so that prefill, transfers and decode blocks of many kinds of request mix.
"""

import collections
from collections.abc import Iterator

import httpx
import pytest
from openai import AsyncOpenAI
from system.differential.answer import Answer, answer_all
from system.differential.difference import differences
from system.differential.groups import ALL, CONCURRENCY, FRONT_END_FLAGS, GROUPS
from system.harness import Stack, complete_all, completion_body
from system.prompts import prompts
from system.servers import run_proxy

TRIP = {
    "type": "function",
    "function": {
        "name": "plan_trip",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def url(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A second proxy over the stack's nodes, with the front-end flags that plain vLLM ran with."""
    directory = tmp_path_factory.mktemp("proxy")
    with run_proxy([stack.prefill], [stack.decode], directory, *FRONT_END_FLAGS) as started:
        yield started


@pytest.mark.parametrize("group", GROUPS)
async def test_answers_equal(
    stack: Stack, url: str, differential_reference: dict[str, Answer], group: str
) -> None:
    """Status, error body, text, token ids, reasons, usage, logprobs and stream shape are plain vLLM's."""
    pushed_before = sum(stack.prefill.by_rank("lockstep_kv_pushed_bytes_total").values())
    answers = await answer_all(url, GROUPS[group], CONCURRENCY)
    found = {name: differences(differential_reference[name], answer) for name, answer in answers.items()}
    different = {name: lines for name, lines in found.items() if lines}
    assert not different, "\n".join("\n    ".join([name, *lines[:6]]) for name, lines in different.items())
    if group != "refused":
        stack.wait_idle()
        assert sum(stack.prefill.by_rank("lockstep_kv_pushed_bytes_total").values()) > pushed_before


def test_the_cases_are_what_they_claim(differential_reference: dict[str, Answer]) -> None:
    """At least 100 requests with names of their own: good and bad by the reference, streams and not."""
    assert len(differential_reference) == len(ALL) >= 100
    counts = collections.Counter(
        (case.streams, differential_reference[case.name]["status"] == 200) for case in ALL
    )
    assert min(counts[streams, good] for streams in (False, True) for good in (False, True)) >= 25, counts


async def test_openai_tools(url: str) -> None:
    """A forced call, streamed and not alike, and the turn after it, which has the tool's answer."""
    asked = [{"role": "user", "content": "Where to?"}]
    request = {"model": "pico", "temperature": 0, "max_tokens": 80, "tools": [TRIP]}
    forced = request | {"tool_choice": {"type": "function", "function": {"name": "plan_trip"}}}
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(**forced, messages=asked)
        stream = await client.chat.completions.create(**forced, messages=asked, stream=True)
        deltas = [call.function async for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
        (call,) = whole.choices[0].message.tool_calls
        answered = {"role": "tool", "tool_call_id": call.id, "content": "booked"}
        turns = [*asked, whole.choices[0].message.model_dump(exclude_none=True), answered]
        after = await client.chat.completions.create(**request, messages=turns, tool_choice="none")
    assert "".join(function.name or "" for function in deltas) == call.function.name == "plan_trip"
    assert "".join(function.arguments or "" for function in deltas) == call.function.arguments != ""
    assert after.choices[0].message.content


async def test_rank_header_chooses_the_rank(stack: Stack) -> None:
    """KV goes to the asked decode rank only; a number that no rank has, or no number, is a 400."""
    body = completion_body(prompts([140], seed=23)[0], max_tokens=6, ignore_eos=True)
    for rank in ("0", "1"):
        before = stack.decode.by_rank("lockstep_draft_tokens_total")
        await complete_all(stack.url, [body] * 3, 3, {"X-data-parallel-rank": rank})
        stack.wait_idle()
        after = stack.decode.by_rank("lockstep_draft_tokens_total")
        assert {r for r in after if after[r] > before.get(r, 0)} == {rank}
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
        for bad in ("2", "-1", "first"):
            answer = await client.post("/v1/completions", json=body, headers={"X-data-parallel-rank": bad})
            assert (bad, answer.status_code) == (bad, 400)
