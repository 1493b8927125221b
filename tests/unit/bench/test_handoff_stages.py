"""The stage table of the hand-over: which time belongs to which row."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
TIMES_MS = (-18, 0, 1, 2, 4, 7, 8, 12, 18, 19, 39)
"""Of the stages, in order."""


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Any:
    """bench is a folder of scripts, not an installed package."""
    monkeypatch.syspath_prepend(REPOSITORY)
    return importlib.import_module("bench.handoff_stages")


def write(directory: Path, process: str, events: list[list[object]]) -> None:
    (directory / f"{process}.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def record(stages: Any, directory: Path, ran: list[list[object]]) -> None:
    """One hand-over whose decode engine also made these steps; a chunk was posted and written before."""
    at = [(stage, ms / 1000) for stage, ms in zip(stages.STAGES, TIMES_MS, strict=True)]
    early: list[list[object]] = [["staged", "a", -0.5], ["posted", "a", -0.5], ["written", "a", -0.4]]
    write(directory, "1", [*early, *([stage, "a", when] for stage, when in at[:7])])
    write(directory, "2", [*([stage, "a", when] for stage, when in at[7:]), *ran])


def test_idle_time_is_what_is_neither_wire_nor_model_nor_a_running_step(stages: Any, tmp_path: Path) -> None:
    """Drafted at 0, first step at 19 ms; a step of others runs until 4 ms after the notice was seen."""
    record(stages, tmp_path, [["ran", 0, 0.0, 0.016], ["ran", 1, 0.0, 0.018], ["ran", 0, 0.019, 0.039]])
    (one,) = stages.read(tmp_path, 5)
    rows = stages.table([one], [(0.002, 0.001)])
    expected = {
        "drafted to staged": 1,
        "staged to write posted": 1,
        "wire: write": 4,
        "write done to looked at": 1,
        "looked at to notice sent": 1,
        "wire: notice": 1,
        "notice there to seen": 3,
        "waited for the running step": 4,
        "seen to admitted": 2,
        "admitted to first step": 1,
        "model: first step": 20,
        "idle": 10,
        "idle, mean": 10,
    }
    assert rows == pytest.approx(expected)


def test_wire_is_the_fastest_of_its_length(stages: Any, tmp_path: Path) -> None:
    """In either group: a pause between two looks only adds to it."""
    record(stages, tmp_path, [])
    (slow,) = stages.read(tmp_path, 1)
    quick = stages.HandOver(slow.at | {"written": 0.005, "seen": 0.010}, 0.0)
    wire = stages.fastest([[slow, slow], [quick, slow]], [8, 400])
    assert wire == [pytest.approx((0.001, 0.002)), pytest.approx((0.003, 0.004))]


def test_hand_overs_that_are_not_whole_are_left_out(stages: Any, tmp_path: Path) -> None:
    """Requests without hand-off sample no token that is handed over."""
    record(stages, tmp_path, [])
    write(tmp_path, "3", [["seen", "b", 0.0], ["admitted", "b", 0.1]])
    assert len(stages.read(tmp_path, 9)) == 1
