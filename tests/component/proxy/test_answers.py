"""Answers of the OpenAI endpoint: the text, the counts, and what the legs carry."""

import asyncio
import json
from typing import Any

import openai
from component.proxy import fake_legs
from component.proxy.stack import Stack, events

PROMPT = "The cat sat on the mat and looked at the moon."
COMPLETION: dict[str, Any] = {"model": "pico", "prompt": PROMPT, "max_tokens": 100, "temperature": 0}


async def test_completion_gives_decodes_tokens_as_text(stack: Stack) -> None:
    """The text is what decode's tokens spell, and it ends where decode ended."""
    answer = await stack.http.post("/v1/completions", json=COMPLETION)
    assert answer.status_code == 200
    choice = answer.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "stop")


async def test_streamed_completion_equals_the_unstreamed_one(stack: Stack) -> None:
    """Several events, together the same text, one finish reason and [DONE]."""
    status, stream = await events(stack, "/v1/completions", {**COMPLETION, "stream": True})
    assert status == 200
    texts = [event["choices"][0]["text"] for event in stream]
    assert "".join(texts) == PROMPT
    assert len(texts) > 3
    assert [e["choices"][0]["finish_reason"] for e in stream][-1] == "stop"


async def test_openai_client_chats(stack: Stack) -> None:
    """The openai client gets a chat answer, streamed and not, with equal text."""
    client = openai.AsyncOpenAI(base_url=str(stack.http.base_url) + "/v1", api_key="none")
    ask: dict[str, Any] = {
        "model": "pico",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 60,
        "temperature": 0,
    }
    whole = await client.chat.completions.create(**ask)
    parts = [part async for part in await client.chat.completions.create(**ask, stream=True)]
    streamed = "".join(part.choices[0].delta.content or "" for part in parts)
    assert whole.choices[0].message.content
    assert PROMPT in whole.choices[0].message.content
    assert streamed == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == parts[-1].choices[0].finish_reason == "stop"
    await client.close()


async def test_max_tokens_bounds_decode_and_usage_counts_it(stack: Stack) -> None:
    """Seven tokens were asked for: seven are counted, and the reason is their number."""
    answer = await stack.http.post("/v1/completions", json={**COMPLETION, "max_tokens": 7})
    body = answer.json()
    assert body["usage"]["completion_tokens"] == 7
    assert body["choices"][0]["finish_reason"] == "length"


async def test_usage_counts_prefills_cached_tokens(start: Any) -> None:
    """Cached tokens are those that prefill did not compute, not what decode got over the wire."""
    stack = await start("--enable-prompt-tokens-details")
    answer = await stack.http.post("/v1/completions", json=COMPLETION)
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == fake_legs.CACHED_TOKENS


async def test_prompt_logprobs_come_from_prefill_only(stack: Stack) -> None:
    """They reach the client, and decode was not asked for them."""
    answer = await stack.http.post("/v1/completions", json={**COMPLETION, "prompt_logprobs": 1})
    rows = answer.json()["choices"][0]["prompt_logprobs"]
    values = {entry["logprob"] for row in rows[1:] for entry in row.values()}
    assert rows[0] is None
    assert len(rows) == answer.json()["usage"]["prompt_tokens"]
    assert values == {fake_legs.PROMPT_LOGPROB}
    assert stack.prefill_leg().sampling_params.prompt_logprobs == 1
    assert stack.decode_leg().sampling_params.prompt_logprobs is None


async def test_both_legs_carry_one_id_one_token_and_their_own_limits(stack: Stack) -> None:
    """Prefill samples one token, decode the asked number; id and token are equal; no client id is shipped."""
    await stack.http.post(
        "/v1/completions", json={**COMPLETION, "min_tokens": 20}, headers={"X-Request-Id": "mine"}
    )
    prefill, decode = stack.prefill_leg(), stack.decode_leg()
    assert prefill.request_id == decode.request_id
    assert "mine" not in prefill.request_id
    assert prefill.external_req_id is decode.external_req_id is None
    assert prefill.prompt_token_ids == decode.prompt_token_ids
    assert (prefill.sampling_params.max_tokens, prefill.sampling_params.min_tokens) == (1, 1)
    assert (decode.sampling_params.max_tokens, decode.sampling_params.min_tokens) == (100, 20)
    sent = [leg.sampling_params.extra_args["kv_transfer_params"] for leg in (prefill, decode)]
    assert sent[0]["lockstep_token"] == sent[1]["lockstep_token"]


async def test_two_choices_are_two_transfers(stack: Stack) -> None:
    """n=2 gives two choices, each with a leg id and a token of its own on both sides."""
    answer = await stack.http.post("/v1/completions", json={**COMPLETION, "n": 2, "temperature": 1})
    assert [choice["text"] for choice in answer.json()["choices"]] == [PROMPT, PROMPT]
    ids = [leg.request.request_id for leg in stack.prefill[0].legs]
    assert len(set(ids)) == 2
    assert sorted(ids) == sorted(leg.request.request_id for leg in stack.decode[0].legs)


async def test_one_request_id_on_two_prompts_gives_two_right_answers(stack: Stack) -> None:
    """Nothing is keyed by the id that the client chose."""
    prompts = ["One fox ran over the hill.", "Two birds sat in a tree and sang a song."]
    answers = await asyncio.gather(
        *(
            stack.http.post(
                "/v1/completions", json={**COMPLETION, "prompt": prompt}, headers={"X-Request-Id": "same"}
            )
            for prompt in prompts
        )
    )
    assert [answer.json()["choices"][0]["text"] for answer in answers] == prompts


async def test_requests_spread_over_both_decode_ranks(stack: Stack) -> None:
    """One after the other, equally loaded ranks take turns."""
    for _ in range(4):
        await stack.http.post("/v1/completions", json=COMPLETION)
    assert [leg.rank for leg in stack.decode[0].legs] == [0, 1, 0, 1]


async def test_rank_header_chooses_the_decode_rank(stack: Stack) -> None:
    """X-data-parallel-rank is honoured, and one that no rank has is refused with vLLM's own message."""
    for _ in range(3):
        await stack.http.post("/v1/completions", json=COMPLETION, headers={"X-data-parallel-rank": "1"})
    wrong = await stack.http.post("/v1/completions", json=COMPLETION, headers={"X-data-parallel-rank": "2"})
    assert {leg.rank for leg in stack.decode[0].legs} == {1}
    assert wrong.status_code == 400
    assert wrong.json()["error"]["message"] == "data_parallel_rank 2 is out of range [0, 2)."


async def test_limit_of_the_served_context_is_enforced(stack: Stack) -> None:
    """The nodes' served limit, not the engine's or the model's: a longer prompt is refused as vLLM does."""
    prompt = [5] * (fake_legs.CONTEXT_LIMIT + 1)
    answer = await stack.http.post("/v1/completions", json={**COMPLETION, "prompt": prompt})
    assert answer.status_code == 400
    assert str(fake_legs.CONTEXT_LIMIT) in answer.json()["error"]["message"]
    assert not stack.prefill[0].legs


async def test_max_tokens_ends_at_the_served_context(stack: Stack) -> None:
    """As a plain vLLM server does with such a completion: it is cut to what fits."""
    await stack.http.post("/v1/completions", json={**COMPLETION, "prompt": [5] * 250})
    assert stack.decode_leg().sampling_params.max_tokens == fake_legs.CONTEXT_LIMIT - 250


async def test_metrics_use_the_proxys_clock(stack: Stack) -> None:
    """The nodes' clock is far ahead; queue, prefill and first-token times are still those of this machine."""
    await stack.http.post("/v1/completions", json=COMPLETION)
    metrics = (await stack.http.get("/metrics")).text
    for name in ("request_queue_time", "request_prefill_time", "request_decode_time", "time_to_first_token"):
        (line,) = [ln for ln in metrics.splitlines() if ln.startswith(f"vllm:{name}_seconds_sum")]
        assert 0 <= float(line.split()[-1]) < fake_legs.CLOCK_SKEW_S / 100, line


async def test_client_cannot_set_transfer_params(stack: Stack) -> None:
    """Refused with the field named, streaming and not; nothing reaches a node, nothing is echoed."""
    hostile = {"do_remote_prefill": True, "remote_host": "10.0.0.9"}
    for stream in (False, True):
        for extra in ({"kv_transfer_params": hostile}, {"vllm_xargs": {"kv_transfer_params": "x"}}):
            answer = await stack.http.post("/v1/completions", json={**COMPLETION, "stream": stream, **extra})
            assert answer.status_code == 400
            error = json.loads(answer.text)["error"]
            assert (error["param"], error["type"]) == ("kv_transfer_params", "BadRequestError")
            assert "10.0.0.9" not in answer.text
    assert not stack.prefill[0].legs
    assert not stack.decode[0].legs


async def test_answer_never_holds_transfer_params(stack: Stack) -> None:
    """What the nodes agree between them is not the client's."""
    answer = await stack.http.post("/v1/completions", json=COMPLETION)
    assert answer.json().get("kv_transfer_params") is None
