"""The MoE exchange between real processes, over gloo and over shared memory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RANKS = Path(__file__).with_name("exchange_ranks.py")
DEADLINE_S = 120


def run_ranks(rendezvous: Path, scenarios: str, way: str, world_size: int) -> list[dict[str, Any]]:
    """Run scenarios one after the other on all ranks; returns what each rank saw, empty if it died."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(RANKS), scenarios, way, str(rank), str(world_size), str(rendezvous)],
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
    codes = [process.returncode for process in processes]
    assert not any(codes), b"\n".join(error for _, error in outputs).decode()
    return [json.loads(out) if out else {} for out, _ in outputs]


@pytest.fixture(scope="module", params=["gloo-2", "gloo-3", "shm-2", "shm-3"])
def exchanged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each rank of a group saw of right and wrong values; the processes start once for all tests."""
    way, world_size = request.param.split("-")
    return run_ranks(tmp_path_factory.mktemp("ranks") / "rendezvous", "values,many", way, int(world_size))


@pytest.fixture(scope="module")
def survivor(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 of two saw over shared memory: no names left, then a late peer, then a dead one."""
    scenarios = "left_behind,late_peer,dead_peer"
    return run_ranks(tmp_path_factory.mktemp("ranks") / "rendezvous", scenarios, "shm", 2)[0]


def test_rows_and_sums_are_right_for_any_sizes(exchanged: list[dict[str, Any]]) -> None:
    """Every rank gets all rows of all tensors, dtype and order kept, and the right sum of its own rows."""
    for seen in exchanged:
        assert len(seen["values"]) == 7
        assert {name: result for name, result in seen["values"].items() if not all(result)} == {}


def test_hundreds_of_exchanges_in_a_row_keep_their_values(exchanged: list[dict[str, Any]]) -> None:
    """A rank that runs ahead never overwrites what its peer still reads."""
    assert [seen["many"] for seen in exchanged] == [0] * len(exchanged)


def test_waiting_for_a_late_peer_leaves_the_core_alone(survivor: dict[str, Any]) -> None:
    """A rank that waits 2 s sleeps most of it instead of spinning."""
    assert survivor["late_peer"]["waited_s"] > 1
    assert survivor["late_peer"]["cpu_s"] < 0.4


def test_a_dead_peer_ends_the_wait(survivor: dict[str, Any]) -> None:
    """The survivor fails within seconds and names the dead rank, instead of waiting for ever."""
    told = survivor["dead_peer"]
    assert told["error"] == "MoE exchange: rank 1 cannot answer, ranks [1] of the group have died"
    assert told["after_s"] < 10


def test_no_name_of_shared_memory_outlives_the_start(survivor: dict[str, Any]) -> None:
    """Segments are unlinked as soon as all ranks have them: a killed engine leaks nothing."""
    assert survivor["left_behind"] == []
