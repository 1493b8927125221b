"""Which line of a failed process's log a user is shown."""

from pathlib import Path

import pytest

from lockstep.cli.logfile import error_line

TRACEBACK = """INFO 11-29 12:00:00 [core.py:1] Initializing
Traceback (most recent call last):
  File "core.py", line 1, in main
    raise ValueError("no space")
ValueError: no space for the KV cache
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (TRACEBACK, "ValueError: no space for the KV cache"),
        (
            "(EngineCore_0 pid=7) ERROR 11-29 12:00:00 [core.py:9] torch.OutOfMemoryError: 2 GiB wanted\n"
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s)\n",
            "OutOfMemoryError: 2 GiB wanted",
        ),
        ("prefill: error: --port: not a number\nbye\n", "prefill: error: --port: not a number"),
        ("loading\nstill loading\n\n", "still loading"),
        ("", ""),
    ],
    ids=["traceback", "root cause", "plain error", "no error", "empty"],
)
def test_error_line(tmp_path: Path, text: str, line: str) -> None:
    """The exception that caused the failure, else the last line that says error, else the last line."""
    log = tmp_path / "log"
    log.write_text(text)
    assert error_line(log) == line


def test_only_the_current_run_counts(tmp_path: Path) -> None:
    """An error of an earlier run, before the offset, is not shown again."""
    log = tmp_path / "log"
    log.write_text("ValueError: old\nnew run\n")
    assert error_line(log, offset_bytes=len("ValueError: old\n")) == "new run"


def test_missing_log(tmp_path: Path) -> None:
    """A process that never got as far as a log has no line."""
    assert error_line(tmp_path / "none") == ""
