"""The state directory."""

import json
from pathlib import Path

import pytest

from lockstep.cli.state import ProcessState, StackState, StateDirectory
from lockstep.errors import ConfigError

STATE = StackState(
    pid=1,
    proxy_url="http://127.0.0.1:8000",
    served_model_name="pico",
    processes=(
        ProcessState(
            role="prefill",
            pid=2,
            http_url="http://127.0.0.1:20002",
            grpc_address="127.0.0.1:20001",
            log="/s/logs/prefill.log",
            restarts=0,
        ),
    ),
    live_url="http://127.0.0.1:20008/lockstep/",
)


def test_state_file(tmp_path: Path) -> None:
    """state.json says where everything is, and nothing else is left beside it by the write."""
    with StateDirectory.take(tmp_path / "s") as state:
        state.write(STATE)
        assert json.loads((tmp_path / "s" / "state.json").read_text()) == {
            "pid": 1,
            "proxy_url": "http://127.0.0.1:8000",
            "served_model_name": "pico",
            "processes": [
                {
                    "role": "prefill",
                    "pid": 2,
                    "http_url": "http://127.0.0.1:20002",
                    "grpc_address": "127.0.0.1:20001",
                    "log": "/s/logs/prefill.log",
                    "restarts": 0,
                }
            ],
            "live_url": "http://127.0.0.1:20008/lockstep/",
        }
        assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["lock", "logs", "state.json"]


def test_state_file_goes_with_its_owner(tmp_path: Path) -> None:
    """After the end, and after a crash before, no stale state.json is to be read."""
    (tmp_path / "state.json").write_text("{}")
    with StateDirectory.take(tmp_path) as state:
        assert not (tmp_path / "state.json").exists()
        state.write(STATE)
    assert not (tmp_path / "state.json").exists()


def test_second_owner_is_refused(tmp_path: Path) -> None:
    """Two stacks cannot share a directory; the message says who has it and what to do."""
    with (
        StateDirectory.take(tmp_path),
        pytest.raises(ConfigError, match=r"another lockstep up \(pid \d+\).*--state-dir"),
        StateDirectory.take(tmp_path),
    ):
        pass


def test_directory_can_be_taken_again(tmp_path: Path) -> None:
    """A stack that ended leaves nothing that blocks the next."""
    with StateDirectory.take(tmp_path):
        pass
    with StateDirectory.take(tmp_path) as state:
        assert state.new_log("proxy").read_bytes() == b""
