"""The MoE exchange between real processes, over gloo and over shared memory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RANKS = Path(__file__).with_name("exchange_ranks.py")
DEADLINE_S = 120


def run_ranks(tmp_path: Path, scenario: str, way: str, world_size: int) -> list[Any]:
    """Run a scenario on all ranks; returns what each saw, None for one that printed nothing."""
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                str(RANKS),
                scenario,
                way,
                str(rank),
                str(world_size),
                str(tmp_path / "rendezvous"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    failed = [
        error.decode() for process, (_, error) in zip(processes, outputs, strict=True) if process.returncode
    ]
    assert not failed, "\n".join(failed)
    return [json.loads(out) if out else None for out, _ in outputs]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("way", ["gloo", "shm"])
def test_rows_and_sums_are_right_for_any_sizes(tmp_path: Path, way: str, world_size: int) -> None:
    """Every rank gets all rows of all tensors, dtype and order kept, and the right sum of its own rows."""
    for seen in run_ranks(tmp_path, "values", way, world_size):
        assert len(seen) == 7
        assert {name: result for name, result in seen.items() if not all(result)} == {}


@pytest.mark.parametrize("way", ["gloo", "shm"])
def test_hundreds_of_exchanges_in_a_row_keep_their_values(tmp_path: Path, way: str) -> None:
    """A rank that runs ahead never overwrites what its peer still reads."""
    assert run_ranks(tmp_path, "many", way, 2) == [0, 0]


def test_waiting_for_a_late_peer_leaves_the_core_alone(tmp_path: Path) -> None:
    """A rank that waits 2 s sleeps most of it instead of spinning."""
    waiting = run_ranks(tmp_path, "late_peer", "shm", 2)[0]
    assert waiting["waited_s"] > 1
    assert waiting["cpu_s"] < 0.4


def test_a_dead_peer_ends_the_wait(tmp_path: Path) -> None:
    """The survivor fails within seconds and names the dead rank, instead of waiting for ever."""
    survivor = run_ranks(tmp_path, "dead_peer", "shm", 2)[0]
    assert survivor["error"] == "MoE exchange: rank 1 cannot answer, ranks [1] of the group have died"
    assert survivor["after_s"] < 10


def test_no_name_of_shared_memory_outlives_the_start(tmp_path: Path) -> None:
    """Segments are unlinked as soon as all ranks have them: a killed engine leaks nothing."""
    assert run_ranks(tmp_path, "left_behind", "shm", 2) == [[], []]
