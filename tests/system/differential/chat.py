"""Good requests to /v1/chat/completions."""

from typing import Any

from system.differential.case import Case, both, forced_call, streamed

USER = {"role": "user", "content": "Write a function that adds two numbers."}
_SYSTEM = {"role": "system", "content": "You write Python."}
_TURNS = [USER, {"role": "assistant", "content": "def add(a, b):\n    return a + b\n"}]
_ASK_AGAIN = {"role": "user", "content": "Now multiply."}
_NEWLINE = 203

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
_OTHER_TOOL = {
    "type": "function",
    "function": {
        "name": "stop",
        "description": "Stops.",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}
_NAMED = {"type": "function", "function": {"name": "get_weather"}}


def _case(name: str, messages: list[dict[str, Any]] | None = None, **extra: Any) -> Case:
    compare = extra.pop("compare", "all")
    path = extra.pop("path", "/v1/chat/completions")
    body = {"model": "pico", "messages": messages or [USER], "temperature": 0, "max_tokens": 24}
    return Case(f"chat: {name}", path, body | extra, compare=compare)


_PLAIN = [
    _case("one turn"),
    _case("token ids", return_token_ids=True),
    _case("system prompt", [_SYSTEM, USER]),
    _case("three turns", [_SYSTEM, *_TURNS, _ASK_AGAIN]),
    _case("content parts", [{"role": "user", "content": [{"type": "text", "text": "Add two numbers."}]}]),
    _case("max_completion_tokens", max_tokens=None, max_completion_tokens=9),
    _case("max_completion_tokens over max_tokens", max_tokens=30, max_completion_tokens=9),
    _case("max_tokens 1", max_tokens=1),
    _case("until its end", max_tokens=300),
    _case("stop string", stop=["return"], max_tokens=80),
    _case("stop string in output", stop=["return"], include_stop_str_in_output=True, max_tokens=80),
    _case("stop token", stop_token_ids=[_NEWLINE], max_tokens=80),
    _case("min_tokens", min_tokens=40, max_tokens=60),
    _case("penalties", presence_penalty=0.7, frequency_penalty=0.7, repetition_penalty=1.2, max_tokens=50),
    _case("bad words", bad_words=["return", "def"], max_tokens=40),
    _case("echo", echo=True),
    _case("no generation prompt", add_generation_prompt=False),
    _case("continues the last message", _TURNS, continue_final_message=True, add_generation_prompt=False),
    _case("n=2", n=2, temperature=1.0, allowed_token_ids=[37], max_tokens=6),
    _case("sampled", temperature=0.9, ignore_eos=True, compare="shape"),
    _case("thinking left out", include_reasoning=False),
    _case("chat template kwargs", chat_template_kwargs={"unused": 1}, max_tokens=4),
    _case("metadata and user", user="somebody", metadata={"a": "b"}, max_tokens=4),
]

_LOGPROBS = [
    _case("logprobs", logprobs=True),
    _case("top_logprobs 0", logprobs=True, top_logprobs=0),
    _case("top_logprobs 4", logprobs=True, top_logprobs=4, max_tokens=40),
    _case("top_logprobs as token ids", logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True),
    _case("top_logprobs and stop", logprobs=True, top_logprobs=2, stop=["return"], max_tokens=80),
    _case("logprobs n=2", logprobs=True, n=2, temperature=1.0, allowed_token_ids=[37], max_tokens=4),
]

_FORMAT = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
_STRUCTURED = [
    _case("schema", response_format=_FORMAT, max_tokens=60),
    _case("json object", response_format={"type": "json_object"}, max_tokens=30),
    _case("choice", structured_outputs={"choice": ["yes", "no"]}),
    _case("regex", structured_outputs={"regex": r"\(\d{3}\) \d{4}"}),
    _case("regex after stop string", structured_outputs={"regex": r"[ab]{12}c"}, stop=["c"], max_tokens=40),
]

_FREE_TOOLS = [
    _case("tools, free to choose", tools=[TOOL, _OTHER_TOOL]),
    _case("tool_choice auto", tools=[TOOL], tool_choice="auto", max_tokens=60),
    _case("tool_choice none", tools=[TOOL], tool_choice="none"),
    _case(
        "tool result",
        [
            USER,
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        ],
    ),
]
_FORCED_TOOLS = [
    _case("named tool", tools=[TOOL, _OTHER_TOOL], tool_choice=_NAMED, max_tokens=60),
    _case("required tool", tools=[TOOL], tool_choice="required", max_tokens=80),
    _case("required of two", tools=[TOOL, _OTHER_TOOL], tool_choice="required", max_tokens=80),
    _case("one call only", tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=80),
    _case("named tool, cut off", tools=[TOOL], tool_choice=_NAMED, max_tokens=5),
]

CASES = [
    *both([*_PLAIN, *_LOGPROBS, *_STRUCTURED, *_FREE_TOOLS]),
    *(made for case in _FORCED_TOOLS for made in forced_call(case, include_usage=True)),
    streamed(_case("no usage")),
    streamed(_case("usage on every chunk"), include_usage=True, continuous_usage_stats=True),
    _case("prompt logprobs", prompt_logprobs=1),
    _case("prompt logprobs n=2", prompt_logprobs=0, n=2, temperature=1.0, allowed_token_ids=[37]),
    _case("beam search", use_beam_search=True, n=2, max_tokens=5),
    _case("batch", [[USER], [_ASK_AGAIN]], path="/v1/chat/completions/batch"),
]
