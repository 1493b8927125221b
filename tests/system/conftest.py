"""One reference run and one shared stack with default flags for the whole session."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from system.differential import groups
from system.differential.answer import Answer, answer_all
from system.harness import Stack, complete_all, completion_body, run_stack
from system.prompts import LENGTHS, prompts
from system.scenarios import bodies as scenario_bodies
from system.servers import run_reference

CONCURRENCY_LENGTHS = LENGTHS + LENGTHS[:16]
"""48 prompts of 2 to 400 tokens."""
TEST_TIMEOUT_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The time limit of a test here is for itself; the starts that one happens to wait for have their own."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S, func_only=True))


@pytest.fixture(scope="session")
def bodies() -> list[dict[str, Any]]:
    return [completion_body(prompt) for prompt in prompts(CONCURRENCY_LENGTHS, seed=1)]


@dataclass(frozen=True)
class ReferenceRun:
    """What plain vLLM answered, all from one start."""

    completions: list[dict[str, Any]]
    differential: dict[str, Answer]
    scenarios: dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def reference_run(tmp_path_factory: pytest.TempPathFactory, bodies: list[dict[str, Any]]) -> ReferenceRun:
    """Plain vLLM's answers. Its server runs before the stack, not beside it: the cores are few.

    It serves the context that the stack serves: 4096 - K * 2 batches in flight - 1.
    """
    directory: Path = tmp_path_factory.mktemp("reference")
    with run_reference(directory, "--max-model-len", "4091", *groups.FRONT_END_FLAGS) as url:
        completions = asyncio.run(complete_all(url, bodies, concurrency=8))
        differential = asyncio.run(answer_all(url, groups.ALL, groups.CONCURRENCY))
        asked = scenario_bodies.REFERENCE
        scenarios = asyncio.run(complete_all(url, list(asked.values()), concurrency=8))
        return ReferenceRun(completions, differential, dict(zip(asked, scenarios, strict=True)))


@pytest.fixture(scope="session")
def reference(reference_run: ReferenceRun) -> list[dict[str, Any]]:
    """The answers to `bodies`, in order."""
    return reference_run.completions


@pytest.fixture(scope="session")
def differential_reference(reference_run: ReferenceRun) -> dict[str, Answer]:
    """The reduced answers to the cases of `differential/`, by the case's name."""
    return reference_run.differential


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, reference_run: ReferenceRun) -> Iterator[Stack]:
    """The one shared stack; it starts after the reference is done."""
    with run_stack(tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_left_over(stack: Stack) -> Iterator[None]:
    """After every test the KV blocks of both sides are free again and a plain request works."""
    yield
    body = completion_body([10, 11, 12, 13], max_tokens=4)
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    stack.wait_idle()
