"""Contracts with vLLM 0.32.0 that lockstep/node and decode_node/limits rest on (docs/vllm-surface.md)."""

import inspect
from dataclasses import fields

import vllm
from vllm.config import CompilationConfig, CUDAGraphMode, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine import core as engine_core
from vllm.v1.engine.core_client import AsyncMPClient, DPLBAsyncMPClient, EngineCoreClient, MPClient
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from lockstep.node import engine_status


def test_pinned_version() -> None:
    """The line numbers and names below were read in this version."""
    assert vllm.__version__ == "0.32.0"


def test_client_to_the_engine_cores() -> None:
    assert list(inspect.signature(EngineCoreClient.make_async_mp_client).parameters)[:3] == [
        "vllm_config",
        "executor_class",
        "log_stats",
    ]
    for name in ("add_request_async", "abort_requests_async", "get_output_async", "call_utility_all_async"):
        assert inspect.iscoroutinefunction(getattr(AsyncMPClient, name)), name
    source = inspect.getsource(MPClient.__init__)
    assert "self.engine_ranks_managed = " in source
    assert "self.resources = BackgroundResources(" in source


def test_rank_is_an_index_into_the_clients_engines() -> None:
    """With several ranks `data_parallel_rank` picks from `core_engines`; a client of one never reads it."""
    source = inspect.getsource(DPLBAsyncMPClient.get_core_engine_for_request)
    assert "eng_index := request.data_parallel_rank" in source
    assert "self.core_engines[eng_index]" in source
    assert "data_parallel_rank" in EngineCoreRequest.__struct_fields__


def test_utilities_are_looked_up_by_name_on_the_engine_core() -> None:
    """And the plugin that adds ours has put them there, without arguments of its own."""
    assert "getattr(self, method_name)" in inspect.getsource(
        engine_core.EngineCoreProc._handle_client_request
    )
    assert inspect.getsource(engine_core.EngineCore.__init__).index("load_general_plugins()") < 2000
    engine_status.register()
    status = getattr(engine_core.EngineCore, engine_status.STATUS_UTILITY)
    abandon = getattr(engine_core.EngineCore, engine_status.ABANDON_UTILITY)
    assert len(inspect.signature(status).parameters) == 1
    assert list(inspect.signature(abandon).parameters)[1:] == ["request_ids"]


def test_utility_of_one_engine_may_answer_later() -> None:
    """A future's result is the answer; the client finds its engines by the index of the rank."""
    assert "isinstance(result, Future)" in inspect.getsource(
        engine_core.EngineCoreProc._invoke_utility_method
    )
    assert inspect.signature(AsyncMPClient._call_utility_async).parameters["engine"].kind is (
        inspect.Parameter.KEYWORD_ONLY
    )
    assert "for engine in self.core_engines" in inspect.getsource(AsyncMPClient.call_utility_all_async)


def test_scheduler_publishes_kv_events_once_a_step() -> None:
    """By the attribute that is replaced, for all groups, out of the pool that is asked."""
    update = inspect.getsource(Scheduler.update_from_output)
    assert "self.kv_event_publisher.publish(batch)" in update
    assert "self.kv_cache_config = kv_cache_config" in inspect.getsource(Scheduler.__init__)
    assert "self.block_pool = " in inspect.getsource(KVCacheManager.__init__)
    assert list(inspect.signature(BlockPool.get_cached_block).parameters)[1:] == [
        "block_hash",
        "kv_cache_group_ids",
    ]


def test_scheduler_says_its_load() -> None:
    assert "len(self.running)" in inspect.getsource(Scheduler.get_request_counts)
    assert "self.kv_cache_manager.usage" in inspect.getsource(Scheduler.get_kv_cache_usage)
    assert callable(Scheduler.get_kv_connector)


def test_rank_suffix_and_port_of_the_connector() -> None:
    source = inspect.getsource(engine_core)
    assert "_dp{" in source
    port = inspect.getsource(NixlBaseConnectorScheduler.__init__)
    assert "envs.VLLM_NIXL_SIDE_CHANNEL_PORT" in port
    assert "+ vllm_config.parallel_config.data_parallel_index" in port


def test_engine_flags_that_are_set_or_owned() -> None:
    names = {field.name for field in fields(AsyncEngineArgs)}
    assert names >= {
        "kv_transfer_config",
        "worker_extension_cls",
        "max_num_seqs",
        "speculative_config",
        "compilation_config",
        "scheduler_cls",
        "worker_cls",
        "additional_config",
        "all2all_backend",
        "cudagraph_capture_sizes",
        "max_cudagraph_capture_size",
        "data_parallel_external_lb",
    }
    assert AsyncEngineArgs.kv_transfer_config is None
    assert AsyncEngineArgs.max_num_seqs is None


def test_dispatcher_that_is_asked_for_its_graphs() -> None:
    """Its keys, after the same rounding that the worker does; they are sets by graph mode."""
    assert list(inspect.signature(CudagraphDispatcher.initialize_cudagraph_keys).parameters)[1:] == [
        "cudagraph_mode",
        "uniform_decode_query_len",
    ]
    assert "self.cudagraph_keys: dict[CUDAGraphMode, set[BatchDescriptor]]" in inspect.getsource(
        CudagraphDispatcher.__init__
    )
    assert "self.adjust_cudagraph_sizes_for_spec_decode(uniform_decode_query_len)" in inspect.getsource(
        CompilationConfig.resolve_cudagraph_mode_and_sizes
    )


def test_budget_that_the_scheduler_cuts_rows_to() -> None:
    """Draft slots count against the one, not against the other."""
    schedule = inspect.getsource(Scheduler.schedule)
    assert "draft_slots = spec.max_num_new_slots_for_drafting if spec is not None else 0" in schedule
    assert "num_new_tokens, token_budget, input_budget - draft_slots" in schedule
    assert SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS == 2048
    assert SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS_FOR_BATCHED_DP == 256


def test_lease_and_its_renewal() -> None:
    """A sixth between renewals, two thirds for each, whole seconds."""
    assert "self._kv_lease_duration // 6" in inspect.getsource(NixlBaseConnectorScheduler.__init__)
    assert "kv_lease_duration * 2 // 3" in inspect.getsource(NixlBaseConnectorWorker.__init__)


def test_engine_core_keeps_what_facts_are_read_from() -> None:
    core = inspect.getsource(engine_core.EngineCore.__init__)
    assert "self.scheduler: SchedulerInterface = Scheduler(" in core
    assert "vllm_config.scheduler_config.get_scheduler_cls()" in core
    assert "self.cudagraph_dispatcher = CudagraphDispatcher" in inspect.getsource(GPUModelRunner.__init__)
    assert isinstance(VllmConfig.use_v2_model_runner, property)


def test_limits_that_are_read() -> None:
    assert isinstance(VllmConfig.max_concurrent_batches, property)
    assert CUDAGraphMode.FULL_DECODE_ONLY.decode_mode() == CUDAGraphMode.FULL
    assert CUDAGraphMode.NONE.decode_mode() == CUDAGraphMode.NONE
