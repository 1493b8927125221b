"""One reference run and one shared stack with default flags for the whole session."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from system.harness import Stack, complete_all, completion_body, run_reference, run_stack
from system.prompts import LENGTHS, prompts

CONCURRENCY_LENGTHS = LENGTHS + LENGTHS[:16]
"""48 prompts of 2 to 400 tokens."""


@pytest.fixture(scope="session")
def bodies() -> list[dict[str, Any]]:
    return [completion_body(prompt) for prompt in prompts(CONCURRENCY_LENGTHS, seed=1)]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Plain vLLM's answers. Its server runs before the stack, not beside it: the cores are few."""
    directory: Path = tmp_path_factory.mktemp("reference")
    with run_reference(directory) as url:
        return asyncio.run(complete_all(url, bodies, concurrency=8))


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, reference: list[dict[str, Any]]) -> Iterator[Stack]:
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
