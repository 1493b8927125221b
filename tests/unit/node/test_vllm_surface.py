"""Contracts with vLLM 0.32.0 that lockstep/node and decode_node/limits rest on (docs/vllm-surface.md)."""

import inspect
from dataclasses import fields

import vllm
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine import core as engine_core
from vllm.v1.engine.core_client import AsyncMPClient, DPLBAsyncMPClient, EngineCoreClient, MPClient

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
        "data_parallel_external_lb",
    }
    assert AsyncEngineArgs.kv_transfer_config is None
    assert AsyncEngineArgs.max_num_seqs is None


def test_limits_that_are_read() -> None:
    assert isinstance(VllmConfig.max_concurrent_batches, property)
    assert CUDAGraphMode.FULL_DECODE_ONLY.decode_mode() == CUDAGraphMode.FULL
    assert CUDAGraphMode.NONE.decode_mode() == CUDAGraphMode.NONE
