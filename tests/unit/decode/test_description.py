"""What a decode node describes of itself: read in the engine core where the node's own copy is wrong."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from unit.decode.resolved import resolved
from vllm.config import CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.engine import core_client

from decode_node.config import DecodeConfig
from decode_node.scheduler import LockstepScheduler
from decode_node.service import ROLE
from lockstep.node.describe import describe
from lockstep.node.engine_status import _lockstep_facts
from lockstep.node.facts import EngineFacts

FLAGS = {"max_num_seqs": 4, "max_model_len": 512, "data_parallel_size": 2}


def engine_core(records: bool = True) -> Any:
    """As far as facts are read from it: the dispatcher and the scheduler's class are real."""
    config = resolved(FLAGS)
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_DECODE_ONLY, 3)
    worker = SimpleNamespace(model_runner=SimpleNamespace(cudagraph_dispatcher=dispatcher))
    if records:
        worker.lockstep_take_step_records = lambda: {"records": [], "dropped": 0}
    config.cache_config.num_gpu_blocks = 20
    return SimpleNamespace(
        vllm_config=config,
        scheduler=LockstepScheduler.__new__(LockstepScheduler),
        model_executor=SimpleNamespace(collective_rpc=lambda method: [method(worker)]),
    )


def test_facts_of_an_engine_core() -> None:
    """Scheduler, graphs, blocks and recorder as they are there."""
    expected = EngineFacts(
        scheduler_cls="decode_node.scheduler.LockstepScheduler",
        async_scheduling=True,
        cudagraph_mode="FULL_DECODE_ONLY",
        full_graph_tokens=[3, 6, 12],
        num_kv_blocks=20,
        records_steps=True,
    )
    assert EngineFacts(**_lockstep_facts(engine_core())) == expected
    assert EngineFacts(**_lockstep_facts(engine_core(records=False))).records_steps is False


def test_runner_without_that_dispatcher_has_no_graphs() -> None:
    """Model runner V2 keeps them elsewhere; the decode role refuses what says that it has none."""
    core = engine_core()
    worker = SimpleNamespace(model_runner=SimpleNamespace())
    core.model_executor.collective_rpc = lambda method: [method(worker)]
    facts = EngineFacts(**_lockstep_facts(core))
    assert (facts.cudagraph_mode, facts.full_graph_tokens) == ("", [])


@pytest.fixture
def _side_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.0.2")


@pytest.mark.usefixtures("_side_channel")
def test_description_has_each_ranks_own_blocks() -> None:
    """vLLM's client adds those of all ranks up in the node's configuration."""
    config = resolved(FLAGS, strict=True, kv_lease_s=42)
    config.cache_config.num_gpu_blocks = 43
    facts = [
        EngineFacts("s.S", True, "FULL_DECODE_ONLY", [3, 6, 12], blocks, records_steps=True)
        for blocks in (20, 23)
    ]
    described = describe(ROLE, DecodeConfig(kv_lease_s=42), config, facts, [0, 1])
    assert [rank.num_kv_blocks for rank in described.ranks] == [20, 23]
    engine = described.engine
    assert (engine.scheduler_cls, list(engine.full_graph_tokens)) == ("s.S", [3, 6, 12])
    assert (engine.strict, engine.arrival_padding, engine.async_scheduling) == (True, True, True)
    assert (engine.kv_lease_s, engine.kv_lease_renewal_s, engine.registration_deadline_s) == (42, 7, 60)
    assert (engine.data_parallel_size, engine.max_num_scheduled_tokens) == (2, 2048)
    assert engine.kv_load_failure_policy == "fail"


def test_vllm_adds_the_blocks_of_all_ranks_up() -> None:
    """Why the node's own copy is not read."""
    assert "num_gpu_blocks += response.num_gpu_blocks" in inspect.getsource(core_client)
