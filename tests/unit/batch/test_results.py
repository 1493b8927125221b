"""What a batch writes, and what a later run takes for done."""

import json
from pathlib import Path

import pytest

from lockstep.batch.results import Result, Results
from lockstep.errors import ConfigError

WANTED = frozenset("abc")


def opened(tmp_path: Path, *, again_failed: bool = False) -> Results:
    return Results(tmp_path / "out", tmp_path / "err", WANTED, again_failed=again_failed)


def test_lines_are_in_openais_format(tmp_path: Path) -> None:
    """An answer, a refusal and a request without an answer; the last two go into the error file."""
    with opened(tmp_path) as results:
        results.add(Result("batch_req_1", "a", 200, "req-1", {"id": "cmpl"}))
        results.add(Result("batch_req_2", "b", 400, "req-2", {"error": {"code": 400}}))
        results.add(Result("batch_req_3", "c", error_code="timeout", error_message="No answer in time."))
    assert [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()] == [
        {
            "id": "batch_req_1",
            "custom_id": "a",
            "response": {"status_code": 200, "request_id": "req-1", "body": {"id": "cmpl"}},
            "error": None,
        }
    ]
    assert [json.loads(line) for line in (tmp_path / "err").read_text().splitlines()] == [
        {
            "id": "batch_req_2",
            "custom_id": "b",
            "response": {"status_code": 400, "request_id": "req-2", "body": {"error": {"code": 400}}},
            "error": None,
        },
        {
            "id": "batch_req_3",
            "custom_id": "c",
            "response": None,
            "error": {"code": "timeout", "message": "No answer in time."},
        },
    ]


def test_without_a_failure_there_is_no_error_file(tmp_path: Path) -> None:
    """An empty one would look like news."""
    with opened(tmp_path) as results:
        results.add(Result("1", "a", 200, "r", {}))
    assert not (tmp_path / "err").exists()


def test_what_is_in_either_file_is_done(tmp_path: Path) -> None:
    """A failure too, unless it is to be asked again: then the error file begins anew."""
    with opened(tmp_path) as results:
        results.add(Result("1", "a", 200, "r", {}))
        results.add(Result("2", "b", 400, "r", {}))
    with opened(tmp_path) as results:
        assert [results.has(id_) for id_ in "abc"] == [True, True, False]
    with opened(tmp_path, again_failed=True) as results:
        assert [results.has(id_) for id_ in "abc"] == [True, False, False]
    assert (tmp_path / "err").read_bytes() == b""


@pytest.mark.parametrize("cut", [1, 10, 30])
def test_a_line_that_was_not_written_to_its_end_is_cut_off(tmp_path: Path, cut: int) -> None:
    """By a run that was killed; its request is asked again, and the next line stands by itself."""
    with opened(tmp_path) as results:
        results.add(Result("1", "a", 200, "r", {}))
        results.add(Result("2", "b", 200, "r", {}))
    whole = (tmp_path / "out").read_bytes()
    (tmp_path / "out").write_bytes(whole[:-cut])
    with opened(tmp_path) as results:
        assert [results.has(id_) for id_ in "ab"] == [True, False]
        results.add(Result("2", "b", 200, "r", {}))
    assert (tmp_path / "out").read_bytes() == whole


@pytest.mark.parametrize("name", ["out", "err"])
def test_files_of_something_else_are_left_alone(tmp_path: Path, name: str) -> None:
    """Another batch's, or no batch's: the message names the file and the line."""
    for line, message in (
        (b'{"custom_id": "z"}\n', f"{name} line 1 is of 'z', which the input does not have"),
        (b"precious\n", f"{name} line 1 is no line of a batch's results; name another file"),
    ):
        (tmp_path / name).write_bytes(line)
        with pytest.raises(ConfigError, match=message):
            opened(tmp_path)
        assert (tmp_path / name).read_bytes() == line


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    """Each would ask what the other asks."""
    with opened(tmp_path), pytest.raises(ConfigError, match="another run writes it"):
        opened(tmp_path)
    opened(tmp_path).close()
