"""The connector's scheduler side inside vLLM's real Scheduler; the worker's reports are made by hand."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kv_transfer.config import kv_transfer_config
from kv_transfer.metadata import CancelOrder, LockstepConnectorMetadata
from kv_transfer.params import PrefillPeer, decode_leg_params, prefill_leg_params

PICO = Path(__file__).parents[3] / "models" / "pico"
BLOCK_SIZE = 16
NUM_BLOCKS = 20
RID = "ls-1-0-a1"
TOKEN = "a" * 32
PEER = PrefillPeer("p0", "127.0.0.1", 5600, 1)
PROMPT = list(range(10, 50))  # 40 tokens: 3 blocks

MakeScheduler = Callable[[Any], "Driver"]


class Driver:
    """One scheduler; `step` is one engine step without a model."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=64, dtype=torch.float32)
        kv_cache_config = KVCacheConfig(
            num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        self.scheduler = Scheduler(
            vllm_config=vllm_config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            log_stats=True,
        )

    def add(self, params: dict[str, Any], request_id: str = RID) -> Request:
        sampling = SamplingParams(max_tokens=1, ignore_eos=True, extra_args={"kv_transfer_params": params})
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(PROMPT),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        )
        self.scheduler.add_request(request)
        return request

    def step(self, report: KVConnectorOutput | None = None, token: int | None = None) -> Any:
        """Returns (metadata for the worker, outputs for the client)."""
        scheduled = self.scheduler.schedule()
        ids = list(scheduled.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[[token] if token is not None else [] for _ in ids],
            kv_connector_output=report,
        )
        outputs = self.scheduler.update_from_output(scheduled, output)
        assert isinstance(scheduled.kv_connector_metadata, LockstepConnectorMetadata)
        return scheduled.kv_connector_metadata, [o for eco in outputs.values() for o in eco.outputs]

    def abort(self) -> None:
        self.scheduler.finish_requests(RID, RequestStatus.FINISHED_ABORTED)

    @property
    def kv_usage(self) -> float:
        return float(self.scheduler.kv_cache_manager.usage)


@pytest.fixture(scope="module")
def base_config() -> VllmConfig:
    init_none_hash(sha256)
    config = EngineArgs(model=str(PICO), dtype="float32", max_model_len=256).create_engine_config()
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    return config


@pytest.fixture
def driver(base_config: VllmConfig) -> Iterator[MakeScheduler]:
    """Makes a scheduler of a role and shuts it down afterwards."""
    made: list[Driver] = []

    def make(role: Any) -> Driver:
        config = kv_transfer_config(role, kv_buffer_device="cpu", engine_id=f"{role}-engine")
        base_config.kv_transfer_config = KVTransferConfig(**config)
        made.append(Driver(base_config))
        return made[-1]

    yield make
    for one in made:
        one.scheduler.shutdown()


def decode_leg() -> dict[str, Any]:
    return decode_leg_params(PEER, RID, TOKEN)


def cancel(reason: str, allocated: bool) -> CancelOrder:
    return CancelOrder(RID, PEER, TOKEN, reason, allocated)


def test_decode_registers_its_blocks_with_the_token(driver: MakeScheduler) -> None:
    """The first step allocates all blocks of the prompt and gives the worker the registration."""
    decode = driver("decode")
    decode.add(decode_leg())
    meta, _ = decode.step()
    registration = meta.push_registrations[RID]
    assert registration["lockstep_token"] == TOKEN
    assert [len(group) for group in registration["local_block_ids"]] == [3]
    assert decode.kv_usage > 0


def test_abort_before_allocation_cancels_without_a_receive(driver: MakeScheduler) -> None:
    """Prefill is told although decode holds nothing; vLLM's empty receive, which leaks, is not made."""
    decode = driver("decode")
    decode.add(decode_leg())
    decode.abort()
    assert decode.scheduler.has_requests()
    meta, _ = decode.step()
    assert meta.cancels == [cancel("aborted_before_allocation", allocated=False)]
    assert meta.reqs_to_recv == {}
    assert not decode.scheduler.has_requests()


def test_abort_while_waiting_keeps_the_blocks_until_the_worker_has_them_back(driver: MakeScheduler) -> None:
    """Fencing: the abort orders a cancel, and only the worker's report frees the blocks."""
    decode = driver("decode")
    decode.add(decode_leg())
    decode.step()
    decode.abort()
    meta, _ = decode.step()
    assert meta.cancels == [cancel("aborted", allocated=True)]
    assert decode.kv_usage > 0
    assert decode.scheduler.has_requests()
    decode.step(KVConnectorOutput(finished_recving={RID}))
    assert decode.kv_usage == 0
    decode.step()
    assert not decode.scheduler.has_requests()


@pytest.mark.parametrize("early", ["failed_recving", "invalid_block_ids"])
def test_failure_before_the_fence_tells_the_client_and_keeps_the_blocks(
    driver: MakeScheduler, early: str
) -> None:
    """Both ways in which the worker reports it fail the request at once; the blocks come later."""
    decode = driver("decode")
    decode.add(decode_leg())
    meta, _ = decode.step()
    blocks = set(meta.push_registrations[RID]["local_block_ids"][0])
    report = {"failed_recving": {RID}, "invalid_block_ids": blocks}[early]
    _, outputs = decode.step(KVConnectorOutput(**{early: report}))
    assert [(output.request_id, str(output.finish_reason)) for output in outputs] == [(RID, "error")]
    assert decode.kv_usage > 0
    decode.step(KVConnectorOutput(finished_recving={RID}))
    assert decode.kv_usage == 0


def test_received_kv_needs_no_cancel_when_the_request_ends(driver: MakeScheduler) -> None:
    """After the KV has arrived prefill holds nothing, so an abort on decode is decode's own affair."""
    decode = driver("decode")
    decode.add(decode_leg())
    decode.step()
    decode.step(KVConnectorOutput(finished_recving={RID}))
    decode.abort()
    meta, _ = decode.step()
    assert meta.cancels == []
    assert decode.kv_usage == 0


def finish_prefill(prefill: Driver, params: dict[str, Any]) -> LockstepConnectorMetadata:
    """Compute the prompt and return the metadata of the step after it."""
    prefill.add(params)
    prefill.step(token=5)
    meta, _ = prefill.step()
    assert isinstance(meta, LockstepConnectorMetadata)
    return meta


def test_prefill_hands_blocks_and_token_to_the_worker(driver: MakeScheduler) -> None:
    """The blocks are held until the worker says that they are sent."""
    prefill = driver("prefill")
    meta = finish_prefill(prefill, prefill_leg_params(TOKEN))
    assert [len(group) for group in meta.push_finished_blocks[RID]] == [3]
    assert meta.tokens == {RID: TOKEN}
    assert prefill.kv_usage > 0
    prefill.step(KVConnectorOutput(finished_sending={RID}))
    assert prefill.kv_usage == 0


def test_aborted_prefill_is_reported_with_its_reason(driver: MakeScheduler) -> None:
    """The worker can tell decode at once; vLLM would say nothing."""
    prefill = driver("prefill")
    prefill.add(prefill_leg_params(TOKEN))
    prefill.abort()
    meta, _ = prefill.step()
    assert meta.ended == {RID: "finished_aborted"}
    assert prefill.kv_usage == 0


def test_prefill_without_a_token_holds_nothing(driver: MakeScheduler) -> None:
    """No registration could match it."""
    prefill = driver("prefill")
    meta = finish_prefill(prefill, {"do_remote_decode": True, "do_remote_prefill": False})
    assert meta.ended == {RID: "no_token"}
    assert prefill.kv_usage == 0


def test_abandoned_blocks_are_passed_to_the_worker(driver: MakeScheduler) -> None:
    """An abort after prefill's end reaches the worker, which knows whether a write is in flight."""
    prefill = driver("prefill")
    finish_prefill(prefill, prefill_leg_params(TOKEN))
    connector: Any = prefill.scheduler.connector
    connector.abandon(RID)
    connector.abandon("unknown")
    meta, _ = prefill.step()
    assert meta.abandoned == {RID: "aborted_after_prefill"}
    prefill.step(KVConnectorOutput(finished_sending={RID}))
    assert prefill.kv_usage == 0
