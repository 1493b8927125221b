"""Fixtures: an endpoint, and `lockstep batch` as a process over a folder of its own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from component.batch.endpoint import Endpoint

LOCKSTEP = str(Path(sys.executable).with_name("lockstep"))
DEADLINE_S = 60.0


def wait_for(what: str, condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.02)


class Batch:
    """Requests whose prompt is their custom_id, and the command that runs them."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.environment: dict[str, str] = {}

    def write(self, *custom_ids: str) -> None:
        lines = [
            {"custom_id": id_, "method": "POST", "url": "/v1/completions", "body": {"prompt": id_}}
            for id_ in custom_ids
        ]
        (self.folder / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def begin(self, *flags: str) -> "subprocess.Popen[str]":
        argv = [LOCKSTEP, "batch", str(self.folder / "r.jsonl"), "--url", self.url, *flags]
        inherited = {k: v for k, v in os.environ.items() if k not in ("OPENAI_API_KEY", "LOCKSTEP_KEY_FILE")}
        return subprocess.Popen(
            argv,
            env=inherited | self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *flags: str) -> tuple[int, str]:
        """The exit code and what was said."""
        return self.end(self.begin(*flags))

    def end(self, process: "subprocess.Popen[str]") -> tuple[int, str]:
        try:
            _, said = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
        return process.returncode, said

    def answers(self) -> dict[str, Any]:
        return self._lines("r.output.jsonl")

    def errors(self) -> dict[str, Any]:
        return self._lines("r.errors.jsonl")

    def _lines(self, name: str) -> dict[str, Any]:
        """By custom_id; none may be there twice."""
        path = self.folder / name
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        by_id = {line["custom_id"]: line for line in lines}
        assert len(by_id) == len(lines)
        return by_id


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    yield endpoint
    endpoint.stop()


@pytest.fixture
def batch(tmp_path: Path, endpoint: Endpoint) -> Batch:
    return Batch(tmp_path, endpoint.url)
