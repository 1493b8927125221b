"""The differential test sees what it should see, and nothing else."""

import json
from typing import Any

import pytest
from system.differential.answer import reduce_stream
from system.differential.difference import differences

Chunk = dict[str, Any]


def _chunk(text: str, ids: list[int], finish: str | None = None) -> Chunk:
    choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": finish, "stop_reason": None}
    return {"id": "cmpl-1", "object": "text_completion", "created": 7, "model": "pico", "choices": [choice]}


def _usage(count: int) -> Chunk:
    return {"id": "cmpl-1", "choices": [], "model": "pico", "usage": {"completion_tokens": count}}


def _sse(*chunks: Chunk) -> str:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


WHOLE = reduce_stream(_sse(_chunk("abcd", [1, 2, 3], "stop"), _usage(3)))


def test_places_of_the_cuts_do_not_matter() -> None:
    """Three tokens in one chunk or in three, the finish with the last one or after it."""
    cut = _sse(_chunk("a", [1]), _chunk("bc", [2]), _chunk("d", [3]), _chunk("", [], "stop"), _usage(3))
    assert differences(WHOLE, reduce_stream(cut)) == []


@pytest.mark.parametrize(
    "other",
    [
        _sse(_chunk("abce", [1, 2, 3], "stop"), _usage(3)),
        _sse(_chunk("abcd", [1, 2, 4], "stop"), _usage(3)),
        _sse(_chunk("abcd", [1, 2, 3], "length"), _usage(3)),
        _sse(_chunk("abcd", [1, 2, 3], "stop"), _usage(4)),
        _sse(_chunk("abcd", [1, 2, 3], "stop")),
        _sse(_usage(3), _chunk("abcd", [1, 2, 3], "stop")),
        _sse(_chunk("ab", [1, 2], "stop"), _chunk("cd", [3]), _usage(3)),
        _sse(_chunk("abcd", [1, 2, 3], "stop"), _usage(3)).replace("data: [DONE]\n\n", ""),
        _sse({**_chunk("abcd", [1, 2, 3], "stop"), "more": 1}, _usage(3)),
    ],
    ids=["text", "ids", "reason", "usage", "no usage", "order", "early finish", "no end", "a field more"],
)
def test_other_differences_do(other: str) -> None:
    """Each of these is a difference that a client can see."""
    assert differences(WHOLE, reduce_stream(other))


def test_stream_of_one_error_is_a_status() -> None:
    """Plain vLLM's late refusal equals the stack's early one, if the body is the same."""
    error = {"error": {"message": "m", "type": "BadRequestError", "param": None, "code": 400}}
    late = {"status": 200, "content_type": "text/event-stream", **reduce_stream(_sse(error))}
    early = {"status": 400, "content_type": "application/json", "body": error}
    other = {**early, "body": {"error": {**error["error"], "message": "n"}}}
    assert differences(late, early) == []
    assert differences(late, other)


def test_floats_are_close_and_types_are_kept() -> None:
    """Logprobs may differ in their last digits; 1 is not 1.0 and not True."""
    assert differences({"a": -1.0}, {"a": -1.001}) == []
    assert differences({"a": -1.0}, {"a": -1.1})
    assert differences({"a": 1}, {"a": 1.0})
    assert differences({"a": 1}, {"a": True})
