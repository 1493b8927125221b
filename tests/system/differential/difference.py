"""Compares two reduced answers and names the first places where they differ."""

import math
from collections.abc import Iterator
from typing import Any

from system.differential.answer import Answer

LOGPROB_TOLERANCE = 2e-3
"""Floats are logprobs only. The sums in a matrix product depend on the batch, so the last digits do."""

_SHOWN = 300


def differences(expected: Answer, got: Answer) -> list[str]:
    """Empty when equal; otherwise one line for each place, the path first."""
    return list(_walk("", _as_status(expected), _as_status(got)))


def _as_status(answer: Answer) -> Answer:
    """A stream that is nothing but an error, as the status and body that the error says.

    Plain vLLM sends the 200 of a stream before it has looked at the request; the stack waits for the first
    event and answers with the error's own status (proxy/first_byte.py).
    """
    error = answer.get("only_error")
    if error is None:
        return answer
    return {"status": error["error"]["code"], "content_type": "application/json", "body": error}


def _walk(path: str, expected: Any, got: Any) -> Iterator[str]:
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in sorted({*expected, *got}, key=str):
            if key not in expected or key not in got:
                yield f"{path}.{key}: only in {'ours' if key in got else 'the reference'}"
            else:
                yield from _walk(f"{path}.{key}", expected[key], got[key])
    elif isinstance(expected, list) and isinstance(got, list):
        if len(expected) != len(got):
            yield f"{path}: {len(expected)} items, ours {len(got)}: {_short(expected)} / {_short(got)}"
        for number, (one, other) in enumerate(zip(expected, got, strict=False)):
            yield from _walk(f"{path}[{number}]", one, other)
    elif isinstance(expected, float) and isinstance(got, float):
        if not math.isclose(expected, got, abs_tol=LOGPROB_TOLERANCE):
            yield f"{path}: {expected}, ours {got}"
    elif expected != got or type(expected) is not type(got):
        yield f"{path}: {_short(expected)}, ours {_short(got)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
