"""Good requests to /v1/completions."""

from typing import Any

from system.differential.case import Case, both, streamed
from system.prompts import prompts

PROMPT = "def parse_args(self, args=None):\n"
LONG, OTHER = prompts([300, 140], seed=21)
NEWLINE = 203
"""The token of a line's end."""


def _case(name: str, prompt: object = PROMPT, **extra: Any) -> Case:
    body = {"model": "pico", "prompt": prompt, "temperature": 0, "max_tokens": 20, "return_token_ids": True}
    compare = extra.pop("compare", "all")
    headers = extra.pop("headers", {})
    return Case(f"completion: {name}", "/v1/completions", body | extra, compare=compare, headers=headers)


_LENGTHS = [
    _case("defaults but greedy"),
    _case("token ids", [947, 677, 203]),
    _case("one prompt token", [572]),
    _case("max_tokens 1", max_tokens=1),
    _case("max_tokens 2", max_tokens=2),
    _case("max_tokens 3", max_tokens=3),
    _case("max_tokens 4", max_tokens=4),
    _case("max_tokens not given", max_tokens=None),
    _case("long prompt", LONG, max_tokens=70, ignore_eos=True),
    _case("no model named", model=None),
    _case("until eos", "import os\n", max_tokens=60),
    _case("min_tokens", "import os\n", min_tokens=30, max_tokens=40),
    _case("ignore_eos", ignore_eos=True, max_tokens=48),
    _case("truncated prompt", LONG, truncate_prompt_tokens=50),
    _case("truncated on the right", LONG, truncate_prompt_tokens=50, truncation_side="right"),
]

_LISTS = [
    _case("two strings", [PROMPT, "import os\n"]),
    _case("two lists of ids", [OTHER, [947, 677, 203]], max_tokens=12),
    # With n > 1 vLLM refuses greedy sampling; one allowed or best token makes every sample the same.
    _case("n=3", n=3, temperature=1.0, top_k=1, max_tokens=30),
    _case("n=3 of one token", n=3, temperature=1.0, allowed_token_ids=[37], max_tokens=7, ignore_eos=True),
    _case("n=2 of two", [PROMPT, "x"], n=2, temperature=1.0, allowed_token_ids=[37], max_tokens=5),
    _case("echo", echo=True),
    _case("echo of ids", OTHER, echo=True),
    _case("echo of two strings", [PROMPT, "import os\n"], echo=True),
    _case("nothing but echo", echo=True, max_tokens=0),
]

_STOPS = [
    _case("stop string", stop="\n", max_tokens=60),
    _case("stop string in output", stop="\n", include_stop_str_in_output=True, max_tokens=60),
    _case("two stop strings", stop=["zzz", "self."], max_tokens=60),
    _case("stop within a token", stop=["ar"], max_tokens=60),
    _case("stop over two tokens", stop=["f.p", "f, ", "s =", "s)"], max_tokens=60),
    _case("stop and min_tokens", stop=["\n"], min_tokens=25, max_tokens=60),
    _case("stop of a list", [PROMPT, "import os\n"], stop=["\n"], max_tokens=60),
    _case("stop token", stop_token_ids=[NEWLINE], max_tokens=60),
    _case("stop token in output", stop_token_ids=[NEWLINE], include_stop_str_in_output=True, max_tokens=60),
    _case("stop tokens and min_tokens", stop_token_ids=[NEWLINE, 281], min_tokens=20, max_tokens=60),
    _case("stop token under ignore_eos", stop_token_ids=[NEWLINE], ignore_eos=True, max_tokens=60),
    _case("special tokens kept", "import os\n", skip_special_tokens=False, max_tokens=60),
]
# A stop token at every place of a block of 1 + K: each of the answer's first tokens in turn.
_PLACES = [
    _case(f"stop at the first newline after {count}", stop_token_ids=[NEWLINE], min_tokens=count)
    for count in range(1, 14)
]

_DETECTION = {"max_pattern_size": 12, "min_pattern_size": 1, "min_count": 4}
_SAMPLING = [
    _case("presence penalty", presence_penalty=1.5, max_tokens=40),
    _case("frequency penalty", frequency_penalty=1.2, max_tokens=40),
    _case("repetition penalty", repetition_penalty=1.3, max_tokens=40),
    _case("all penalties", LONG, presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.1),
    _case("bad words", bad_words=["self", "return"], max_tokens=40),
    _case("allowed tokens", allowed_token_ids=[37, 203, 263, 281, 338, 947], max_tokens=24),
    _case("penalties over eos", "import os\n", repetition_penalty=1.5, min_tokens=10, max_tokens=40),
    _case("repetition detection", max_tokens=200, ignore_eos=True, repetition_detection=_DETECTION),
    _case("cache salt", cache_salt="salt", max_tokens=8),
    _case("stream interval", stream_interval=4, max_tokens=24),
    _case("priority 0", priority=0, max_tokens=4),
    _case("user", user="somebody", max_tokens=4),
    _case("top_k and top_p", temperature=1.0, top_k=20, top_p=0.9, ignore_eos=True, compare="shape"),
    _case("seeded", temperature=0.8, seed=11, ignore_eos=True, compare="shape"),
    _case("temperature 1", temperature=1.0, ignore_eos=True, compare="shape"),
    _case("temperature not given", temperature=None, ignore_eos=True, compare="shape"),
    _case("a client's request id", headers={"X-Request-Id": "mine"}, max_tokens=4),
]

_LOGPROBS = [
    _case("logprobs 0", logprobs=0),
    _case("logprobs 1", logprobs=1),
    _case("logprobs 5", logprobs=5, max_tokens=40),
    _case("logprobs as token ids", logprobs=2, return_tokens_as_token_ids=True),
    _case("logprobs of a list", [PROMPT, "import os\n"], logprobs=2),
    _case("logprobs and stop string", logprobs=2, stop=["\n"], max_tokens=60),
    _case("logprobs and stop token", logprobs=2, stop_token_ids=[NEWLINE], max_tokens=60),
    _case("logprobs under penalties", logprobs=3, repetition_penalty=1.3),
    _case("logprobs of one token", logprobs=5, max_tokens=1),
    _case("echo and logprobs", echo=True, logprobs=1),
    _case("echo and logprobs, no token", OTHER, echo=True, logprobs=2, max_tokens=0),
]

_PROMPT_LOGPROBS = [
    _case("prompt logprobs", prompt_logprobs=1),
    _case("prompt logprobs 0", prompt_logprobs=0),
    _case("prompt logprobs of many blocks", LONG, prompt_logprobs=2, max_tokens=5),
    _case("prompt logprobs of a list", [PROMPT, "import os\n"], prompt_logprobs=1, max_tokens=5),
    _case("prompt logprobs and logprobs", prompt_logprobs=3, logprobs=3),
    _case("prompt logprobs of one token", [572], prompt_logprobs=1, max_tokens=3),
    # A second time: the prompt is in the prefix caches of both sides now.
    _case("prompt logprobs again", LONG, prompt_logprobs=1, max_tokens=4),
]

_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_GRAMMAR = 'root ::= "SELECT " col " FROM t"\ncol ::= "a" | "b" | col ", " col'

_STRUCTURED = [
    _case("schema", structured_outputs={"json": _SCHEMA}, max_tokens=60),
    _case("regex", structured_outputs={"regex": r"[a-c]{3}-\d{4}"}, max_tokens=30),
    _case("choice", structured_outputs={"choice": ["positive", "negative"]}),
    _case("grammar", structured_outputs={"grammar": _GRAMMAR}, max_tokens=20),
    _case("any object", structured_outputs={"json_object": True}, max_tokens=30),
    _case(
        "response format schema",
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}},
        max_tokens=60,
    ),
    _case("response format object", response_format={"type": "json_object"}, max_tokens=30),
    _case("response format text", response_format={"type": "text"}),
    _case("choices, n=3", n=3, temperature=1.0, top_k=1, structured_outputs={"choice": ["only"]}),
    _case("regex and logprobs", structured_outputs={"regex": r"\d{6}"}, logprobs=2),
    _case("regex and stop", structured_outputs={"regex": r"[a-z]{20}"}, stop=["e"], max_tokens=40),
]

_STREAMS = [
    streamed(_case("no usage")),
    streamed(_case("usage on every chunk", max_tokens=24), include_usage=True, continuous_usage_stats=True),
    streamed(_case("usage off"), include_usage=False),
    streamed(_case("text only", return_token_ids=False, max_tokens=24), include_usage=True),
]

_LIMIT = [
    _case("last place of the context", prompts([4090], seed=22)[0], max_tokens=1),
    _case("up to the context's end", prompts([4060], seed=22)[0], max_tokens=31, ignore_eos=True),
    _case("cut at the context's end", prompts([4080], seed=22)[0], max_tokens=100, ignore_eos=True),
]

CASES = [
    *both([*_LENGTHS, *_LISTS, *_STOPS, *_SAMPLING, *_LOGPROBS, *_STRUCTURED]),
    *_PLACES,
    *_PROMPT_LOGPROBS,
    *_STREAMS,
    *_LIMIT,
    _case("beam search", use_beam_search=True, n=2, max_tokens=6),
]
