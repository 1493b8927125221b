"""One more stack, whose decode ranks have so few KV blocks that requests wait for them and lose them."""

from collections.abc import Iterator

import pytest
from system.conftest import ReferenceRun
from system.harness import Stack, run_stack
from system.kv_checks import kv_moves_and_returns
from system.scenarios.tight_pools.bodies import COMPACT_JSON, POOL_BLOCKS


@pytest.fixture(scope="package")
def tight(tmp_path_factory: pytest.TempPathFactory, reference_run: ReferenceRun) -> Iterator[Stack]:
    """Decode with `POOL_BLOCKS` blocks a rank; a step that is not uniform would end its engine."""
    flags = (
        *(f"--{role}-arg=--max-model-len=1024" for role in ("prefill", "decode")),
        *(f"--{role}-arg=--structured-outputs-config={COMPACT_JSON}" for role in ("prefill", "decode")),
        f"--decode-arg=--num-gpu-blocks-override={POOL_BLOCKS + 1}",  # vLLM keeps one null block
        "--decode-arg=--strict",
    )
    with run_stack(tmp_path_factory.mktemp("tight"), *flags) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_left_over(tight: Stack) -> Iterator[None]:
    """As for the scenarios on the shared stack. No rank ended and was started again meanwhile."""
    pids = [tight.prefill.pid, tight.decode.pid]
    with kv_moves_and_returns(tight):
        yield
    assert [tight.prefill.pid, tight.decode.pid] == pids
