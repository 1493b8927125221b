"""Good requests to the other routes: responses, messages, tokenizing, models, health and the like."""

from typing import Any

from system.differential.case import Case, forced_call
from system.differential.chat import SCHEMA, USER

_INPUT = "Write a function that adds two numbers."
_FUNCTION = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
_TOOL = {"tools": [{"name": "get_weather", "description": "Weather.", "input_schema": SCHEMA}]}
_NAMED = {"type": "tool", "name": "get_weather"}


def _response(name: str, **extra: Any) -> list[Case]:
    body = {"model": "pico", "input": _INPUT, "temperature": 0, "max_output_tokens": 20} | extra
    return [
        Case(f"response: {name}", "/v1/responses", body),
        Case(f"response: {name}, streamed", "/v1/responses", body | {"stream": True}),
    ]


def _message(name: str, **extra: Any) -> list[Case]:
    body = {"model": "pico", "messages": [USER], "temperature": 0, "max_tokens": 20} | extra
    return [
        Case(f"message: {name}", "/v1/messages", body),
        Case(f"message: {name}, streamed", "/v1/messages", body | {"stream": True}),
    ]


def _post(name: str, path: str, **body: Any) -> Case:
    return Case(name, path, body)


def _get(path: str) -> Case:
    return Case(f"GET {path}", path, method="GET")


_RESPONSES = [
    *_response("a string"),
    *_response("until its end", max_output_tokens=300),
    *_response("instructions", instructions="You write Python."),
    *_response("messages", input=[{"role": "user", "content": _INPUT}]),
    *_response("parts", input=[{"role": "user", "content": [{"type": "input_text", "text": _INPUT}]}]),
    *_response("logprobs", top_logprobs=2, include=["message.output_text.logprobs"]),
    *_response(
        "schema",
        text={"format": {"type": "json_schema", "name": "trip", "schema": SCHEMA, "strict": True}},
        max_output_tokens=60,
    ),
    *forced_call(
        _response("required tool", tools=[_FUNCTION], tool_choice="required", max_output_tokens=80)[0]
    ),
    *_response("penalties", presence_penalty=0.8, frequency_penalty=0.3),
    *_response("not stored", store=False, metadata={"a": "b"}, user="somebody"),
]

_MESSAGES = [
    *_message("one turn"),
    *_message("until its end", max_tokens=300),
    *_message("system prompt", system="You write Python."),
    *_message("stop sequence", stop_sequences=["return"], max_tokens=80),
    *_message("parts", messages=[{"role": "user", "content": [{"type": "text", "text": _INPUT}]}]),
    *forced_call(_message("any tool", **_TOOL, tool_choice={"type": "any"}, max_tokens=80)[0]),
    *forced_call(_message("one tool", **_TOOL, tool_choice=_NAMED, max_tokens=60)[0]),
    _post("message: count", "/v1/messages/count_tokens", model="pico", messages=[USER]),
]

_TOKENS = [
    _post("tokenize", "/tokenize", model="pico", prompt="def f(x):\n    return x\n"),
    _post("tokenize, with strings", "/tokenize", model="pico", prompt="def f(x)", return_token_strs=True),
    _post("tokenize a chat", "/tokenize", model="pico", messages=[USER]),
    _post("detokenize", "/detokenize", model="pico", tokens=[323, 1744, 67, 545]),
    _post("detokenize nothing", "/detokenize", model="pico", tokens=[]),
    _post("render", "/v1/completions/render", model="pico", prompt="import os\n", max_tokens=4),
    _post("render a chat", "/v1/chat/completions/render", model="pico", messages=[USER], max_tokens=4),
]

_SAMPLING = {"temperature": 0, "max_tokens": 9}
_GENERATE = [
    _post("generate", "/inference/v1/generate", token_ids=[947, 677, 203], sampling_params=_SAMPLING),
    _post(
        "generate a stream",
        "/inference/v1/generate",
        token_ids=[947, 677, 203],
        sampling_params=_SAMPLING,
        stream=True,
    ),
]

_GETS = [
    _get(path)
    for path in ("/v1/models", "/health", "/version", "/ping", "/load", "/openapi.json", "/kv_event_sources")
]

_INVOCATIONS = [
    _post("invocation", "/invocations", model="pico", prompt="import os\n", max_tokens=6, temperature=0),
    _post("chat invocation", "/invocations", model="pico", messages=[USER], max_tokens=6, temperature=0),
]

CASES = [*_RESPONSES, *_MESSAGES, *_TOKENS, *_GENERATE, *_GETS, *_INVOCATIONS]
