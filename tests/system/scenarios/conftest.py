"""Every scenario is run between the same checks, on the stack that it uses."""

from collections.abc import Iterator
from typing import Any

import pytest
from system.conftest import ReferenceRun
from system.harness import Stack
from system.kv_checks import kv_moves_and_returns


@pytest.fixture(autouse=True)
def nothing_left_over(stack: Stack) -> Iterator[None]:
    """KV bytes move from prefill to decode, both pools go back to where they were, a plain request works."""
    with kv_moves_and_returns(stack):
        yield


@pytest.fixture(scope="session")
def scenario_reference(reference_run: ReferenceRun) -> dict[str, dict[str, Any]]:
    """Plain vLLM's answers to `bodies.REFERENCE`, by name."""
    return reference_run.scenarios
