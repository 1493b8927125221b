"""Finds, in the log of a process that failed, the one line that says why."""

import re
from pathlib import Path

TAIL_BYTES = 256 * 1024

_EXCEPTION = re.compile(
    r"(?:^|[\s:\]])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)): (\S.*)$"
)
_ERROR_WORD = re.compile(r"\berror\b", re.IGNORECASE)
_NOT_THE_CAUSE = ("root cause above", "See stack trace", "Traceback (most recent call last)")


def error_line(path: Path, offset_bytes: int = 0) -> str:
    """The last line after `offset_bytes` that names an error, else the last line at all, else nothing.

    A parent reports its child's failure last ("… See root cause above."); an earlier line names the cause.
    """
    lines = [line.rstrip() for line in _tail(path, offset_bytes).splitlines() if line.strip()]
    lines = [line for line in lines if not any(text in line for text in _NOT_THE_CAUSE)]
    for line in reversed(lines):
        if found := _EXCEPTION.search(line):
            return f"{found[1].rsplit('.', 1)[-1]}: {found[2]}"
    for line in reversed(lines):
        if _ERROR_WORD.search(line):
            return line.strip()
    return lines[-1].strip() if lines else ""


def _tail(path: Path, offset_bytes: int) -> str:
    try:
        with path.open("rb") as log:
            end = log.seek(0, 2)
            log.seek(max(offset_bytes, end - TAIL_BYTES))
            return log.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
