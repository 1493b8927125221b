"""The input of a batch: what a bad line is told."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.batch import requests_file
from lockstep.errors import ConfigError

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def written(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_lines_are_read_as_openai_writes_them(tmp_path: Path) -> None:
    """Bodies as they are; empty lines are none, and count as lines all the same."""
    path = written(tmp_path, GOOD, "", GOOD | {"custom_id": "b", "body": {"seed": 2**60}})
    assert requests_file.check(path) == {"a", "b"}
    requests = list(requests_file.read(path))
    assert [(r.number, r.custom_id, r.url) for r in requests] == [
        (1, "a", "/v1/completions"),
        (3, "b", "/v1/completions"),
    ]
    assert requests[1].body == {"seed": 2**60}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "no JSON: .*; write one object on one line"),
        ('"\udc80"', "no JSON"),
        ("[1]", r"\[1\] is no object"),
        ({k: v for k, v in GOOD.items() if k != "custom_id"}, "custom_id: missing"),
        (GOOD | {"custom_id": 7}, "custom_id: 7 is no id; give a string"),
        (GOOD | {"custom_id": ""}, "custom_id: '' is no id"),
        (GOOD | {"method": "GET"}, "method: 'GET' is not possible; write POST"),
        (GOOD | {"url": "/v1/embeddings"}, "url: '/v1/embeddings' is not possible; write one of /v1/chat"),
        (GOOD | {"url": "http://elsewhere/v1/completions"}, "url: 'http://elsewhere"),
        (GOOD | {"url": ["x"]}, "url: "),
        (GOOD | {"body": "x"}, "body: 'x' is no object"),
        (GOOD | {"body": {"stream": True}}, r"body\.stream: .* leave it out"),
        (GOOD | {"model": "m"}, "model: not a field of a batch; .* go into body"),
        (GOOD | {"custom_id": "first"}, "custom_id: 'first' is line 1's too; give each line one of its own"),
    ],
)
def test_bad_line_is_named_with_field_and_fix(tmp_path: Path, line: Any, message: str) -> None:
    """By its number in the file."""
    path = tmp_path / "requests.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    path.write_bytes(
        f"{json.dumps(GOOD | {'custom_id': 'first'})}\n{text}\n".encode(errors="surrogateescape")
    )
    with pytest.raises(ConfigError, match=rf"requests\.jsonl line 2: {message}"):
        requests_file.check(path)


def test_all_bad_lines_are_told_at_once_up_to_a_limit(tmp_path: Path) -> None:
    """A file is mended in one go; one that is something else altogether fills no screen."""
    two = written(tmp_path, "{", GOOD, "[]")
    with pytest.raises(ConfigError, match=r"(?s)line 1: .*line 3: "):
        requests_file.check(two)
    with pytest.raises(ConfigError) as many:
        requests_file.check(written(tmp_path, *["{"] * 1000))
    assert len(str(many.value).splitlines()) == 21


def test_a_file_without_requests_or_none_at_all_is_refused(tmp_path: Path) -> None:
    """With what to give instead."""
    with pytest.raises(ConfigError, match="has no request; give it one JSON object a line"):
        requests_file.check(written(tmp_path, ""))
    with pytest.raises(ConfigError, match="No such file or directory; give a file of requests"):
        requests_file.check(tmp_path / "nowhere")
