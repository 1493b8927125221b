"""The two files that a batch writes, in OpenAI's format, and what an earlier run has left in them."""

import fcntl
import os
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from lockstep.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Result:
    """How one request ended. `id` is the request's `X-Request-Id`, by which the proxy's log names it.

    `body` is the answer's, also of one that refuses; without an answer, `error_code` and `error_message` say
    why there is none.
    """

    id: str
    custom_id: str
    status_code: int | None = None
    request_id: str | None = None
    body: Any = None
    error_code: str | None = None
    error_message: str | None = None

    @property
    def succeeded(self) -> bool:
        return self.status_code == 200 and self.error_code is None

    def line(self) -> bytes:
        """As OpenAI writes it: `response` is null without an answer, `error` is null with one."""
        response = error = None
        if self.error_code is not None:
            error = {"code": self.error_code, "message": self.error_message}
        else:
            response = {"status_code": self.status_code, "request_id": self.request_id, "body": self.body}
        fields = {"id": self.id, "custom_id": self.custom_id, "response": response, "error": error}
        return msgspec.json.encode(fields) + b"\n"


class Results:
    """Opens both files for appending, and knows which requests are done.

    A line is written whole and at once, so that a killed run loses at most what it was just writing: such a
    part of a line is cut off, and its request is asked again. The output file is locked while it is open.
    """

    def __init__(self, output: Path, errors: Path, wanted: Set[str], *, again_failed: bool = False) -> None:
        """Raises ConfigError for a file that is another batch's, or that another run writes.

        `wanted`: the custom_ids of the input. `again_failed`: what is in the error file is not done.
        """
        self._output_fd = _open(output)
        try:
            fcntl.flock(self._output_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._output_fd)
            raise ConfigError(f"{output}: another run writes it; wait for it or name another file") from None
        try:
            self.succeeded = _done(output, self._output_fd, wanted)
            self._errors, self._errors_fd = errors, -1
            self.failed: set[str] = set()
            if errors.exists():
                self._errors_fd = _open(errors)
                if again_failed:
                    os.ftruncate(self._errors_fd, 0)
                self.failed = _done(errors, self._errors_fd, wanted)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for number in (self._output_fd, getattr(self, "_errors_fd", -1)):
            if number >= 0:
                os.close(number)

    def has(self, custom_id: str) -> bool:
        """Whether the request is done, well or not."""
        return custom_id in self.succeeded or custom_id in self.failed

    def add(self, result: Result) -> None:
        """Append to the file that it belongs into; the error file is made with its first line."""
        if result.succeeded:
            self.succeeded.add(result.custom_id)
            _write(self._output_fd, result.line())
            return
        if self._errors_fd < 0:
            self._errors_fd = _open(self._errors)
        self.failed.add(result.custom_id)
        _write(self._errors_fd, result.line())


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a file that can be written") from error


def _write(number: int, line: bytes) -> None:
    left = memoryview(line)
    while left:
        left = left[os.write(number, left) :]


def _done(path: Path, number: int, wanted: Set[str]) -> set[str]:
    """The custom_ids in a file, after cutting off a line that was not written to its end."""
    found: set[str] = set()
    whole_bytes = 0
    with path.open("rb") as file:
        for line_number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                os.ftruncate(number, whole_bytes)
                break
            whole_bytes += len(line)
            found.add(_custom_id(path, line_number, line, wanted))
    return found


def _custom_id(path: Path, line_number: int, line: bytes, wanted: Set[str]) -> str:
    where = f"{path} line {line_number}"
    try:
        custom_id = msgspec.json.decode(line)["custom_id"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        raise ConfigError(f"{where} is no line of a batch's results; name another file") from None
    if custom_id not in wanted:
        raise ConfigError(f"{where} is of {custom_id!r}, which the input does not have; name another file")
    return str(custom_id)
