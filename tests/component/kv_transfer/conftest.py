"""What the tests of real connectors have in common."""

from collections.abc import Iterator

import pytest
from component.kv_transfer.engines import one_rank_world


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """vLLM's process groups of one rank, for all engines of a module."""
    with one_rank_world():
        yield
