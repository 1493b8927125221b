"""Requests that are refused, and how."""

import itertools
from typing import Any

from system.differential.case import Case, streamed
from system.differential.chat import TOOL, USER

_COMPLETION = {"model": "pico", "prompt": "import os\n", "temperature": 0, "max_tokens": 8}
_CHAT = {"model": "pico", "messages": [USER], "temperature": 0, "max_tokens": 8}

_BAD_VALUES: list[dict[str, Any]] = [
    {"temperature": -1},
    {"temperature": 3},
    {"temperature": "hot"},
    {"top_p": 0},
    {"top_p": 1.5},
    {"top_k": -2},
    {"top_k": 1.5},
    {"min_p": 2},
    {"min_p": 0.1},  # not with speculation
    {"logit_bias": {"37": 5}},  # not with speculation
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"99999": 1}},
    {"presence_penalty": 3},
    {"frequency_penalty": -3},
    {"repetition_penalty": 0},
    {"max_tokens": -1},
    {"max_tokens": "many"},
    {"max_tokens": 1.5},
    {"min_tokens": -1},
    {"min_tokens": 9},
    {"n": 0},
    {"n": 2},  # greedy
    {"n": 100000},
    {"n": "two"},
    {"seed": "x"},
    {"seed": 2**70},
    {"stop": [""]},
    {"stop": 5},
    {"stop_token_ids": ["x"]},
    {"stop_token_ids": [99999]},
    {"bad_words": [""]},
    {"allowed_token_ids": []},
    {"allowed_token_ids": [99999]},
    {"prompt_logprobs": -2},
    {"prompt_logprobs": 1000},
    {"prompt_logprobs": "x"},
    {"logprob_token_ids": [1]},
    {"stream_options": {"include_usage": True}},
    {"structured_outputs": {"json": {"type": "nonsense"}}},
    {"structured_outputs": {"json": "{"}},
    {"structured_outputs": {"regex": "(["}},
    {"structured_outputs": {"grammar": "root := :="}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    {"structured_outputs": {}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "nonsense"}},
    {"repetition_detection": {"max_pattern_size": 2, "min_count": 1}},
    {"thinking_token_budget": 5},
    {"thinking_token_budget": -5},
    {"priority": 3},
    {"cache_salt": ""},
    {"truncate_prompt_tokens": 9999},
    {"stream_interval": 0},
    {"watermarking": True},
    {"model": "nope"},
    {"use_beam_search": True, "n": 0},
]

_BAD_COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": ""},
    {"prompt": None},
    {"prompt": []},
    {"prompt": [[]]},
    {"prompt": [99999]},
    {"prompt": [-1]},
    {"prompt": {"a": 1}},
    {"prompt": [1, "x"]},
    {"prompt": [5] * 5000},
    {"prompt": [5] * 4091},
    {"prompt": [5] * 4092},
    {"prompt": "x " * 6000},
    {"prompt": [[5] * 5000, [5]]},
    {"prompt_embeds": "AAAA"},
    {"logprobs": -2},
    {"logprobs": 1000},
    {"logprobs": "x"},
    {"suffix": "x"},
    {"echo": "perhaps"},
]

_BAD_CHATS: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": None},
    {"messages": "hello"},
    {"messages": [{"role": "user"}]},
    {"messages": [{"content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "nonsense"}]}]},
    {"messages": [{"role": "user", "content": "x " * 6000}]},
    {"max_tokens": 5000},
    {"max_completion_tokens": 5000},
    {"top_logprobs": 2},
    {"logprobs": True, "top_logprobs": 1000},
    {"logprobs": True, "top_logprobs": -2},
    {"logprobs": "x"},
    {"tools": []},
    {"tools": [TOOL], "tool_choice": "sometimes"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
    {"tools": [TOOL], "tool_choice": {"type": "function"}},
    {"tools": [{"type": "function"}]},
    {"tool_choice": "required"},
    {"add_generation_prompt": True, "continue_final_message": True},
    {"chat_template": "{{ messages }}"},
]

_BAD_RESPONSES: list[dict[str, Any]] = [
    {"input": None},
    {"input": []},
    {"input": 5},
    {"model": "nope"},
    {"max_output_tokens": 0},
    {"max_output_tokens": 5000},
    {"temperature": -1},
    {"top_logprobs": 1000},
    {"previous_response_id": "resp_0"},
    {"previous_response_id": "other"},
    {"background": True},
    {"tools": [{"type": "function"}]},
    {"text": {"format": {"type": "json_schema", "name": "x"}}},
    {"input": "x " * 6000},
]

_BAD_MESSAGES: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": None},
    {"model": "nope"},
    {"max_tokens": 0},
    {"max_tokens": 5000},
    {"max_tokens": None},
    {"temperature": -1},
    {"top_k": -7},
    {"messages": [{"role": "nobody", "content": "x"}]},
    {"messages": [{"role": "user", "content": "x " * 6000}]},
    {"tools": [{"name": "x"}]},
    {"tool_choice": {"type": "tool", "name": "x"}},
]


def _bad(kind: str, path: str, body: dict[str, Any], values: list[dict[str, Any]]) -> list[Case]:
    return [
        Case(f"bad {kind} {number}: {str(value)[:50]}", path, body | value)
        for number, value in enumerate(values)
    ]


def _also_streamed(cases: list[Case]) -> list[Case]:
    """A stream must give the same refusal; not for options that only a stream may have."""
    return cases + [streamed(case) for case in cases if "stream_options" not in (case.body or {})]


_RAW = [
    Case(f"raw {path}: {name}", path, raw=raw, headers={"Content-Type": content_type})
    for path, (name, raw, content_type) in itertools.product(
        ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"),
        (
            ("no body", b"", "application/json"),
            ("not JSON", b'{"model": "pico", ', "application/json"),
            ("a list", b"[1, 2]", "application/json"),
            ("a string", b'"hello"', "application/json"),
            ("an empty object", b"{}", "application/json"),
            ("not UTF-8", b'{"prompt": "\xff\xfe"}', "application/json"),
            ("another content type", b'{"model": "pico", "prompt": "x"}', "text/plain"),
            (
                "a number that is none",
                b'{"model": "pico", "prompt": "x", "temperature": NaN}',
                "application/json",
            ),
        ),
    )
]

_ROUTES = [
    Case("no such route", "/v1/nothing", {}),
    Case("no such page", "/nothing", method="GET"),
    Case("GET a completion", "/v1/completions", method="GET"),
    Case("DELETE a chat", "/v1/chat/completions", method="DELETE"),
    Case("POST models", "/v1/models", {}),
    Case("a model by its name", "/v1/models/pico", method="GET"),
    Case("a response that is not there", "/v1/responses/resp_0", method="GET"),
    Case("cancel a response that is not there", "/v1/responses/resp_0/cancel", {}),
    Case("tokenize with another model", "/tokenize", {"model": "nope", "prompt": "x"}),
    Case("tokenize nothing", "/tokenize", {"model": "pico"}),
    Case("detokenize no id", "/detokenize", {"model": "pico", "tokens": [99999]}),
    Case("detokenize a wrong type", "/detokenize", {"model": "pico", "tokens": "x"}),
    Case("generate from nothing", "/inference/v1/generate", {"token_ids": [], "sampling_params": {}}),
    Case("generate without parameters", "/inference/v1/generate", {"token_ids": [5]}),
    Case("adapter route", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "y"}),
    Case("transcription route", "/v1/audio/transcriptions", {}),
    Case("count with another model", "/v1/messages/count_tokens", {"model": "nope", "messages": [USER]}),
]

# Plain vLLM has no such routes for a model that generates: 404 too, but no word on why.
_POOLING = [
    Case(f"pooling route {path}", path, {"model": "pico", "input": "x"}, compare="status")
    for path in ("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v2/embed")
]

CASES = [
    *_also_streamed(_bad("completion", "/v1/completions", _COMPLETION, _BAD_VALUES + _BAD_COMPLETIONS)),
    *_also_streamed(_bad("chat", "/v1/chat/completions", _CHAT, _BAD_VALUES + _BAD_CHATS)),
    *_also_streamed(
        _bad("response", "/v1/responses", {"model": "pico", "input": "x", "temperature": 0}, _BAD_RESPONSES)
    ),
    *_also_streamed(_bad("message", "/v1/messages", _CHAT, _BAD_MESSAGES)),
    *_RAW,
    *_ROUTES,
    *_POOLING,
]
