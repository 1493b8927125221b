"""vLLM's and NIXL's private surface that kv_transfer touches is still as docs/vllm-surface.md says."""

import ast
import inspect
import queue
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator, TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorTransferResults,
    SupportsHMA,
    supports_hma,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler, base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector as nixl_connector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    GET_META_MSG,
    NIXL_CONNECTOR_VERSION,
    PUSH_REG_NOTIF_PREFIX,
    NixlAgentMetadata,
    NixlConnectorMetadata,
    NixlHandshakePayload,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.v1.core.sched.output import KVConnectorBlockState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput

from kv_transfer.config import kv_transfer_config
from kv_transfer.connector import LockstepPushConnector
from kv_transfer.metadata import LockstepConnectorMetadata


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def source(function: Callable[..., Any]) -> str:
    return inspect.getsource(function)


def attributes_set_by(function: Callable[..., Any]) -> set[str]:
    """Names assigned to `self` in the function's body."""
    tree = ast.parse(textwrap.dedent(source(function)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def test_connector_version() -> None:
    """Everything below was read in this version of vLLM's NIXL connector."""
    assert NIXL_CONNECTOR_VERSION == 14


def test_factory_takes_our_connector() -> None:
    """vLLM's factory finds the class by module path and accepts its constructor."""
    from vllm.config import KVTransferConfig

    config = KVTransferConfig(**kv_transfer_config("decode", kv_buffer_device="cpu"))
    assert KVConnectorFactory.get_connector_class(config) is LockstepPushConnector


def test_connector_keeps_vllms_abilities() -> None:
    """Hybrid KV cache support is inherited, and FULL graphs are not given up."""
    assert issubclass(LockstepPushConnector, SupportsHMA)
    assert supports_hma(LockstepPushConnector)
    assert LockstepPushConnector.requires_piecewise_for_cudagraph({}) is False


def test_connector_constructor_makes_both_sides_only_in_the_subclass() -> None:
    """Our constructor calls the base of NixlPushConnector, which must not make the sides itself."""
    assert parameters(nixl_connector.NixlBaseConnector.__init__) == [
        "self",
        "vllm_config",
        "role",
        "kv_cache_config",
    ]
    push = source(nixl_connector.NixlPushConnector.__init__)
    assert "decode_context_parallel_size > 1" in push  # the one check that ours repeats
    assert "NixlPushConnectorWorker(" not in source(nixl_connector.NixlBaseConnector.__init__)


def test_push_scheduler_state() -> None:
    """The attributes that our scheduler side reads and writes."""
    state = attributes_set_by(NixlPushConnectorScheduler.__init__) | attributes_set_by(
        base_scheduler.NixlBaseConnectorScheduler.__init__
    )
    assert state >= {
        "_push_pending_registrations",
        "_push_registration_deadlines",
        "_finished_request_blocks",
        "_newly_finished_push_blocks",
        "_reqs_not_processed",
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("update_state_after_alloc", ["self", "request", "blocks", "num_external_tokens"]),
        ("request_finished", ["self", "request", "block_ids"]),
        ("build_connector_meta", ["self", "scheduler_output"]),
        ("update_connector_output", ["self", "connector_output"]),
        ("has_pending_push_work", ["self"]),
        ("_stop_heartbeat", ["self", "req_id"]),
        ("on_new_request", ["self", "request"]),
    ],
)
def test_push_scheduler_methods(name: str, expected: list[str]) -> None:
    """The methods that our scheduler side overrides or calls."""
    assert parameters(getattr(NixlPushConnectorScheduler, name)) == expected


def test_registration_keys() -> None:
    """The keys of vLLM's registration that our notices read."""
    text = source(NixlPushConnectorScheduler.update_state_after_alloc)
    for key in (
        "request_id",
        "decode_engine_id",
        "decode_host",
        "decode_port",
        "decode_tp_size",
        "local_block_ids",
        "remote_engine_id",
        "remote_host",
        "remote_port",
        "remote_tp_size",
    ):
        assert f'"{key}"' in text


def test_metadata_is_extended_by_copying_its_fields() -> None:
    """vLLM's metadata keeps its fields in `__dict__`, and names none of ours."""
    stock, ours = NixlConnectorMetadata(), LockstepConnectorMetadata()
    assert vars(stock).keys() >= {"push_registrations", "push_finished_blocks", "reqs_to_send"}
    assert vars(ours).keys() - vars(stock).keys() == {
        "cancels",
        "questions",
        "tokens",
        "first_tokens",
        "chunks",
        "preempted",
        "ended",
        "abandoned",
    }


def test_worker_makes_its_agent_from_the_module_global() -> None:
    """`agent_for_worker` replaces this global around the constructor."""
    assert hasattr(base_worker, "NixlWrapper")
    assert "nixl_wrapper_cls = NixlWrapper" in source(NixlBaseConnectorWorker.__init__)


def test_worker_constructor_changes_the_affinity_on_cpu() -> None:
    """If vLLM stops doing that, `keep_cpu_affinity` can go."""
    assert "os.sched_setaffinity(0, rsv_cores_for_kv)" in source(NixlBaseConnectorWorker.__init__)


def test_worker_state() -> None:
    """The attributes that our worker side reads and writes."""
    state = attributes_set_by(NixlBaseConnectorWorker.__init__) | attributes_set_by(
        NixlPushConnectorWorker.__init__
    )
    # Annotated assignments are `Store` too, so both spellings count.
    assert state >= {
        "_recving_metadata",
        "_recving_transfers",
        "_reqs_to_send",
        "_reqs_to_process",
        "_sending_transfers",
        "_send_failures",
        "_sending_transfers_lock",
        "_pending_completion_notifs",
        "_push_writer_wake",
        "_push_writer_stop",
        "_invalid_block_ids",
        "_handshake_lock",
        "_remote_agents",
        "_handshake_initiation_executor",
        "_physical_blocks_per_logical_kv_block",
        "_lease_extension",
        "dst_xfer_side_handles",
        "block_len_per_layer",
        "nixl_wrapper",
        "xfer_stats",
        "world_size",
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("start_load_kv", ["self", "metadata"]),
        ("get_transfer_results", ["self"]),
        ("register_kv_caches", ["self", "kv_caches"]),
        ("_reap_expired_send_leases", ["self", "done_sending"]),
        ("_try_release_xfer_handle", ["self", "req_id", "handle"]),
        ("_engines_with_inflight_transfers", ["self"]),
        ("_get_new_notifs", ["self"]),
        ("_handle_heartbeat", ["self", "payload"]),
        ("_push_writer_loop", ["self"]),
        ("_do_start_push_kv", ["self", "request_id", "local_block_ids", "registration_data"]),
        ("_cleanup_remote_engine", ["self", "engine_id", "log_eviction"]),
        (
            "_ensure_handshake",
            ["self", "engine_id", "host", "port", "tp_size", "dcp_size", "pp_size", "notif_agents_only"],
        ),
    ],
)
def test_worker_methods(name: str, expected: list[str]) -> None:
    """The methods that our worker side overrides or calls."""
    assert parameters(getattr(NixlPushConnectorWorker, name)) == expected


def test_engine_of_a_receive_is_looked_up_when_it_ends() -> None:
    """It raises for one that was dropped or never connected, so ours sees to it that there is an entry."""
    results = source(NixlBaseConnectorWorker.get_transfer_results)
    assert "self.transfer_topo.get_engine_info(meta.remote.engine_id)" in results
    assert parameters(TransferTopology.get_engine_info) == ["self", "remote_engine_id", "remote_pp_rank"]
    assert parameters(TransferTopology.register_remote_engine)[:3] == ["self", "remote_engine_id", "info"]


def test_worker_posts_each_handle_in_one_method() -> None:
    """Our `_xfer_blocks` keeps the handle from the caller, which then has none to publish."""
    assert "request_id" in parameters(NixlPushConnectorWorker._xfer_blocks)
    caller = source(NixlPushConnectorWorker._xfer_blocks_for_req)
    assert "handle = self._xfer_blocks(" in caller
    assert "request_id=req_id," in caller
    assert "if handle is not None:" in caller
    assert "self._send_failures.add(request_id)" in source(NixlPushConnectorWorker._xfer_blocks)


def test_worker_pairs_lists_of_equal_length_as_they_are() -> None:
    """Chunks are cut to equal lengths before vLLM trims, so its trimming must leave them alone."""
    worker: Any = type("Worker", (), {"_has_mamba": False})()
    remote, local = NixlPushConnectorWorker._apply_prefix_caching(worker, [[7, 8], []], [[1, 2], []], 1, 1)
    assert ([list(group) for group in remote], [list(group) for group in local]) == (
        [[7, 8], []],
        [[1, 2], []],
    )


def test_expired_leases_are_found_behind_renewed_ones() -> None:
    """vLLM looks at every lease: a heartbeat may have renewed the ones in front."""
    text = source(NixlBaseConnectorWorker._reap_expired_send_leases)
    assert "for req_id, expires in self._reqs_to_send.items() if now >= expires" in text


def test_writer_thread_runs_the_overridden_loop() -> None:
    """vLLM starts the thread with the method, so our loop takes its place."""
    assert "target=self._push_writer_loop" in source(NixlPushConnectorWorker.register_kv_caches)


def test_the_notice_of_a_write_can_be_left_out() -> None:
    """vLLM gives each write its own completion notice; our agent drops it by this keyword."""
    from nixl._api import nixl_agent

    assert "notif_msg=notif_id" in source(NixlPushConnectorWorker._xfer_blocks)
    assert '"WRITE",' in source(NixlPushConnectorWorker._xfer_blocks)
    assert inspect.signature(nixl_agent.make_prepped_xfer).parameters["notif_msg"].default == b""


def test_a_write_can_be_made_and_not_posted() -> None:
    """vLLM makes a handle, posts it by itself and returns it whatever NIXL says: the post can wait."""
    from nixl._api import nixl_agent

    posting = source(NixlPushConnectorWorker._xfer_blocks).split("make_prepped_xfer")[1]
    assert "self.nixl_wrapper.transfer(handle)\n" in posting
    assert "return handle" in posting
    assert parameters(nixl_agent.transfer) == ["self", "handle", "notif_msg"]


def test_notification_prefixes() -> None:
    """What tells registrations and heartbeats from completions."""
    assert PUSH_REG_NOTIF_PREFIX == b"PUSH_REG:"
    assert '"HB:"' in source(NixlBaseConnectorWorker._send_heartbeats)


def test_handshake_probe() -> None:
    """The side channel answers (GET_META_MSG, pp rank, tp rank) with a payload that names the engine."""
    assert GET_META_MSG == b"get_meta_msg"
    assert "agent_metadata_bytes" in NixlHandshakePayload.__dataclass_fields__
    assert "engine_id" in NixlAgentMetadata.__dataclass_fields__


def test_stats() -> None:
    """The statistics that ours extend are cleared and sent by `clone_and_reset`."""
    assert parameters(NixlKVConnectorStats.record_transfer) == ["self", "res"]
    assert parameters(NixlKVConnectorStats.clone_and_reset) == ["self"]
    assert "res.totalBytes" in source(NixlKVConnectorStats.record_transfer)


def test_failed_receives_in_transfer_results() -> None:
    """A receive can fail before it is over: vLLM's scheduler then keeps the blocks with the request."""
    results = KVConnectorTransferResults()
    assert results.failed_recving == results.finished_recving == set()
    assert "delay_free_blocks = (" in source(Scheduler.finish_requests)


def test_aggregator_holds_failed_receives_back_but_not_block_ids() -> None:
    """Why `_report_failed` also names the blocks."""
    aggregator = KVOutputAggregator(expected_finished_count=1)

    class WorkerOutput:
        kv_connector_output = KVConnectorOutput(failed_recving={"r1"}, invalid_block_ids={7})

    merged = aggregator.aggregate([WorkerOutput()], 0)  # type: ignore[list-item]
    assert merged.kv_connector_output.failed_recving == set()
    assert merged.kv_connector_output.invalid_block_ids == {7}


def test_nixl_agent_hard_codes_the_progress_delay() -> None:
    """If NIXL's Python API takes the delay some day, kv_transfer/agent.py can go."""
    from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

    assert parameters(nixl_agent.__init__) == ["self", "agent_name", "nixl_conf", "instantiate_all"]
    assert "agent_config = nixlBind.nixlAgentConfig()" in source(nixl_agent.__init__)
    assert "agent_config.pthrDelay = 0" in source(nixl_agent.__init__)
    assert nixl_agent_config().sync_mode is None
    assert hasattr(nixl_thread_sync_t, "NIXL_THREAD_SYNC_STRICT")


def test_push_worker_adds_to_results_what_we_do_without() -> None:
    """A wake of the writer thread and the ends of its own writes, of which ours has none."""
    assert NixlPushConnectorWorker.__bases__ == (NixlBaseConnectorWorker,)
    added = source(NixlPushConnectorWorker.get_transfer_results)
    assert set(re.findall(r"self\.(\w+)", added)) == {
        "_push_writer_wake",
        "_sending_transfers",
        "_sending_transfers_lock",
        "_pop_done_transfers",
        "_send_failures",
        "_reqs_to_send",
        "_reqs_to_process",
        "consumer_notification_counts_by_req",
        "_evict_finished_inbox",
    }


def test_inboxes_are_queues() -> None:
    """The inbox of vLLM's worker that we fill is a `queue.Queue`."""
    assert "self._invalid_block_ids: queue.Queue" in source(NixlBaseConnectorWorker.__init__)
    assert issubclass(queue.Empty, Exception)


def test_scheduler_offers_block_tables_to_the_connector() -> None:
    """Of every scheduled request, even without an allocation, before the step's tokens are counted."""
    schedule = source(Scheduler.schedule)
    assert "block_state_req_ids = set(num_scheduled_tokens)" in schedule
    assert "preempted_req_ids=self.reset_preempted_req_ids" in schedule
    built = schedule.index("self._build_kv_connector_meta(")
    assert built < schedule.index("self._update_after_schedule(scheduler_output)")
    assert "get_block_ids" in vars(KVConnectorBlockState)


def test_runner_saves_after_the_drafter() -> None:
    """`wait_for_save` is where a step's KV is whole: after the forward pass, and with drafts after theirs."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    mixin = source(KVConnectorModelRunnerMixin._get_kv_connector_output)
    assert mixin.rindex("kv_connector.start_load_kv(") < mixin.index("kv_connector.wait_for_save()")
    assert "defer_kv_connector_finalize = self.speculative_config is not None" in source(
        GPUModelRunner.execute_model
    )
    sample = source(GPUModelRunner.sample_tokens)
    assert sample.rindex("propose_draft_token_ids(") < sample.index("self.finalize_kv_connector()")
    assert "get_kv_transfer_group().handle_preemptions(" in source(GPUModelRunner.execute_model)
