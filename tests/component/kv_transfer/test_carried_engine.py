"""A real engine goes on from carried tokens exactly as it would have without a break: greedy and sampled."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("carried_engine.py")
MODEL = Path(__file__).parents[3] / "models" / "pico"
DEADLINE_S = 400
CASES = [
    "plain",
    "logprobs",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "json",
    "regex",
]

pytestmark = [pytest.mark.full, pytest.mark.timeout(DEADLINE_S + 60)]


@pytest.fixture(scope="module", params=["async", "sync"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one engine answered, with asynchronous scheduling or without."""
    output = tmp_path_factory.mktemp("carried") / "answers.json"
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
        [sys.executable, str(SCRIPT), str(MODEL), request.param, str(output)],
        env=environ,
        capture_output=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert finished.returncode == 0, finished.stderr.decode()[-4000:]
    answers: dict[str, Any] = json.loads(output.read_text())
    return answers


def joined(whole: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """The answer of an attempt with the tokens before it, whose log probabilities came with those."""
    carried = part["carried"]
    return {
        "tokens": whole["tokens"][:carried] + part["tokens"],
        "finish": part["finish"],
        "stop": part["stop"],
    }


@pytest.mark.parametrize("name", CASES)
def test_a_continued_answer_is_the_uninterrupted_one(seen: dict[str, Any], name: str) -> None:
    """Tokens, finish reason and stop reason, wherever the break was, with cached KV and with none."""
    for entry in seen["cases"][name]:
        whole = {key: entry["whole"][key] for key in ("tokens", "finish", "stop")}
        assert len(entry["continued"]) >= 10
        for part in entry["continued"]:
            assert joined(entry["whole"], part) == whole, (part["carried"], part["cold"])


@pytest.mark.parametrize("name", ["logprobs", "repetition_penalty"])
def test_log_probabilities_go_on(seen: dict[str, Any], name: str) -> None:
    """Of the same tokens and as large, up to the rounding of another batch."""
    for entry in seen["cases"][name]:
        for part in entry["continued"]:
            expected = entry["whole"]["logprobs"][part["carried"] :]
            assert [sorted(position) for position in part["logprobs"]] == [sorted(p) for p in expected]
            for position, wanted in zip(part["logprobs"], expected, strict=True):
                assert position == pytest.approx(wanted, abs=0.01)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("plain", "logprobs")])
def test_each_parameter_matters(seen: dict[str, Any], name: str) -> None:
    """Else the comparison would hold whatever became of it: the answer differs from the plain one."""
    plain = [entry["whole"]["tokens"] for entry in seen["cases"]["plain"]]
    assert [entry["whole"]["tokens"] for entry in seen["cases"][name]] != plain


def test_a_stop_token_ends_a_continued_answer(seen: dict[str, Any]) -> None:
    """And min_tokens holds it off, counting carried tokens."""
    for entry in seen["cases"]["min_tokens"]:
        assert entry["whole"]["finish"] == "stop" or len(entry["whole"]["tokens"]) == 40
        assert len(entry["whole"]["tokens"]) > 20


def total_variation(one: list[int], other: list[int]) -> float:
    """Half the sum of the differences of shares: 0 for the same distribution, 1 for disjoint ones."""
    a, b = Counter(one), Counter(other)
    return sum(abs(a[token] / len(one) - b[token] / len(other)) for token in a | b) / 2


@pytest.mark.parametrize("position", [0, 1])
def test_sampled_tokens_have_the_distribution_of_the_same_text(seen: dict[str, Any], position: int) -> None:
    """No further from what follows the same tokens in a prompt than two halves of that from each other."""
    whole = [tokens[position] for tokens in seen["sampled"]["whole"]]
    continued = [tokens[position] for tokens in seen["sampled"]["continued"]]
    assert total_variation(whole, continued) < total_variation(whole[::2], whole[1::2])
