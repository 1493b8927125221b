"""The input of a batch: OpenAI's JSONL of requests, checked whole before the first one is asked."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lockstep.errors import ConfigError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""What a line may ask for."""

_FIELDS = ("custom_id", "method", "url", "body")
_MAX_PROBLEMS = 20
_MAX_SHOWN = 60


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line of the input. `custom_id` is the only thing that ties an answer to it."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


class _BadLineError(ValueError):
    """The message names the field and says what to write."""


def check(path: Path) -> frozenset[str]:
    """The custom_ids of all lines. Raises ConfigError that lists bad lines, one a row: number, field, fix."""
    first: dict[str, int] = {}
    problems: list[str] = []
    for number, line in _lines(path):
        try:
            request = _parse(number, line)
            if request.custom_id in first:
                raise _BadLineError(
                    f"custom_id: {_shown(request.custom_id)} is line {first[request.custom_id]}'s too; "
                    "give each line one of its own"
                )
            first[request.custom_id] = number
        except _BadLineError as error:
            problems.append(f"{path} line {number}: {error}")
        if len(problems) == _MAX_PROBLEMS:
            problems.append("and perhaps more; nothing was asked")
            break
    if problems:
        raise ConfigError("\n".join(problems))
    if not first:
        raise ConfigError(f"{path} has no request; give it one JSON object a line")
    return frozenset(first)


def read(path: Path) -> Iterator[BatchRequest]:
    """The requests, one at a time, of a file that was checked."""
    for number, line in _lines(path):
        try:
            yield _parse(number, line)
        except _BadLineError as error:
            raise ConfigError(f"{path} line {number}, changed since the start: {error}") from error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """With their numbers from 1 on; empty ones are left out."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; give a file of requests") from error


def _parse(number: int, line: bytes) -> BatchRequest:
    try:
        fields = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _BadLineError(f"no JSON: {error}; write one object on one line, in UTF-8") from error
    if not isinstance(fields, dict):
        raise _BadLineError(f"{_shown(fields)} is no object; write {{{', '.join(_FIELDS)}}}")
    for name in _FIELDS:
        if name not in fields:
            raise _BadLineError(f"{name}: missing; a line has {', '.join(_FIELDS)}")
    if unknown := sorted(fields.keys() - set(_FIELDS)):
        raise _BadLineError(f"{unknown[0]}: not a field of a batch; a request's own fields go into body")
    custom_id, method, url, body = (fields[name] for name in _FIELDS)
    if not isinstance(custom_id, str) or not custom_id:
        raise _BadLineError(f"custom_id: {_shown(custom_id)} is no id; give a string that is not empty")
    if method != "POST":
        raise _BadLineError(f"method: {_shown(method)} is not possible; write POST")
    if url not in URLS:
        raise _BadLineError(f"url: {_shown(url)} is not possible; write one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise _BadLineError(f"body: {_shown(body)} is no object; write the request as the endpoint takes it")
    if body.get("stream"):
        raise _BadLineError("body.stream: a batch's answers come whole; leave it out")
    return BatchRequest(number, custom_id, url, body)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
