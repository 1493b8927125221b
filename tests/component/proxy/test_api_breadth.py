"""What the front end adds around generation: parsers, the rank header, routes that are not there."""

import json
from typing import Any

import pytest
from component.proxy.conftest import Start
from component.proxy.stack import Stack, events

from lockstep.errors import NoDecodeNodeError
from proxy import unserved_routes

CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
THOUGHT = "Here is my thought process: I add. Here is my response: Four."
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


def _chat(content: str, **extra: Any) -> dict[str, Any]:
    body = {"model": "pico", "messages": [{"role": "user", "content": content}], "temperature": 0}
    return body | {"max_tokens": 120} | extra


async def test_tool_parser_reads_decodes_tokens(start: Start) -> None:
    """With a parser chosen, a call in the generated text becomes a tool call, streamed and not."""
    stack = await start("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    body = _chat(CALL, tools=[TOOL])
    answer = (await stack.http.post("/v1/chat/completions", json=body)).json()["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == "tool_calls"
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "get_weather",
        {"city": "Oslo"},
    )
    _, stream = await events(stack, "/v1/chat/completions", {**body, "stream": True})
    deltas = [event["choices"][0]["delta"].get("tool_calls") or [] for event in stream]
    functions = [part["function"] for delta in deltas for part in delta]
    assert [f["name"] for f in functions if f.get("name")] == ["get_weather"]
    assert json.loads("".join(f.get("arguments") or "" for f in functions)) == {"city": "Oslo"}
    assert stream[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_reasoning_parser_splits_decodes_tokens(start: Start) -> None:
    """With a parser chosen, thought and answer are told apart, streamed and not."""
    # The parser does not find its heading where a first token ends in the middle of it.
    stack = await start("--reasoning-parser", "granite", "--hand-off", "off")
    answer = (await stack.http.post("/v1/chat/completions", json=_chat(THOUGHT))).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning"].strip(), message["content"].strip()) == ("I add.", "Four.")
    _, stream = await events(stack, "/v1/chat/completions", _chat(THOUGHT, stream=True))
    deltas = [event["choices"][0]["delta"] for event in stream]
    assert "".join(delta.get("reasoning") or "" for delta in deltas).strip() == "I add."
    assert "".join(delta.get("content") or "" for delta in deltas).strip() == "Four."


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "The cat sat.", "max_tokens": 4}),
        ("/v1/chat/completions", _chat("The cat sat.")),
        ("/v1/responses", {"input": "The cat sat.", "max_output_tokens": 20}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "The cat."}], "max_tokens": 20}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_rank_header_is_read_on_every_route(
    stack: Stack, path: str, body: dict[str, Any], stream: bool
) -> None:
    """The asked rank generates, wherever the request came in; others are 400, and nothing is sent on."""
    body = {**body, "model": "pico", "stream": stream}
    for _ in range(2):
        answer = await stack.http.post(path, json=body, headers={"X-Data-Parallel-Rank": "1"})
        assert answer.status_code == 200, answer.text
    assert [leg.rank for leg in stack.decode[0].legs] == [1, 1]
    for bad in ("2", "-1", "first", "1.0", ""):
        answer = await stack.http.post(path, json=body, headers={"X-data-parallel-rank": bad})
        assert (bad, answer.status_code) == (bad, 400)
        assert "rank" in answer.json()["error"]["message"]
    assert len(stack.decode[0].legs) == 2


async def test_rank_of_one_request_is_not_that_of_the_next(stack: Stack) -> None:
    """On a connection that stays open, a request without the header may go anywhere again."""
    body = {"model": "pico", "prompt": "The cat sat.", "max_tokens": 4}
    await stack.http.post("/v1/completions", json=body, headers={"X-data-parallel-rank": "1"})
    for _ in range(2):
        await stack.http.post("/v1/completions", json=body)
    assert {leg.rank for leg in stack.decode[0].legs[1:]} == {0, 1}


@pytest.mark.parametrize("path", unserved_routes.PATHS)
async def test_pooling_routes_say_why_they_are_not_there(stack: Stack, path: str) -> None:
    """404 in OpenAI's shape, with the route and the reason."""
    answer = await stack.http.post(path, json={"model": "pico", "input": "x"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (404, 404, "Not Found")
    assert path in error["message"]
    assert "generates text" in error["message"]


async def test_chosen_ids_logprobs_are_refused(stack: Stack) -> None:
    """They end vLLM's engine when it speculates, so they reach no node, whatever the route."""
    ask = {"model": "pico", "max_tokens": 4, "logprobs": 2, "logprob_token_ids": [5, 6]}
    for stream in (False, True):
        for path, extra in (
            ("/v1/completions", {"prompt": "The cat"}),
            ("/v1/chat/completions", {**_chat("The cat"), "logprobs": True, "top_logprobs": 2}),
        ):
            answer = await stack.http.post(path, json={**ask, **extra, "stream": stream})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprob_token_ids")
    assert not stack.prefill[0].legs
    assert not stack.decode[0].legs


STREAMS = [
    ("/v1/responses", {"input": "The cat sat.", "max_output_tokens": 20}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "The cat."}], "max_tokens": 20}),
]


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_stream_that_fails_before_its_first_token_has_a_status(
    stack: Stack, path: str, body: dict[str, Any]
) -> None:
    """The same status and body as without streaming, though vLLM began to answer with a 200."""
    stack.prefill[0].set.delay_s = 5  # its token would be one
    answers = []
    for stream in (False, True):
        stack.decode[0].set.fail_first = 8  # more than it takes to give this node up
        stack.decode[0].set.fail_with = NoDecodeNodeError("No decode node is ready.")
        answers.append(await stack.http.post(path, json={**body, "model": "pico", "stream": stream}))
    plain, streamed = (answer.json()["error"] for answer in answers)
    assert [answer.status_code for answer in answers] == [503, 503]
    assert streamed["message"].startswith("No decode node is ready. Before that: No decode node is ready.")
    assert {**plain, "message": ""} == {**streamed, "message": ""}


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_stream_that_fails_later_ends_with_the_error(
    stack: Stack, path: str, body: dict[str, Any]
) -> None:
    """As an event of the route's own kind, with the cause's message, and as the last one."""
    stack.decode[0].set.pause_after_tokens = 3
    lines = []
    async with stack.http.stream("POST", path, json={**body, "model": "pico", "stream": True}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            lines.append(line)
            if '"The c' in line:
                await stack.decode[0].stop()
    kind, data = [line for line in lines if line][-2:]
    event = json.loads(data.removeprefix("data: "))
    assert (kind, event["type"]) == ("event: error", "error")
    assert event.get("error", event)["message"].startswith(
        "No decode node is ready. Before that: A node that held the request went away."
    )
    if path == "/v1/responses":
        numbers = [
            json.loads(line.removeprefix("data: "))["sequence_number"]
            for line in lines
            if line.startswith("data: ")
        ]
        assert numbers == list(range(len(numbers)))
