"""Two engines that move real KV bytes: vLLM's scheduler and our connector, with arithmetic for a model.

Only the model is missing: a "forward pass" writes, for every scheduled token, a number that depends on the
token, its place and the layer. So decode's blocks can be compared with what prefill must have computed.
"""

import itertools
import os
import pickle
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kv_transfer.config import kv_transfer_config
from kv_transfer.connector import LockstepPushConnector
from kv_transfer.params import PrefillPeer, decode_leg_params, prefill_leg_params

PICO = Path(__file__).parents[3] / "models" / "pico"
BLOCK_SIZE = 32  # what vLLM's CPU attention backend allows
LAYERS = ("layers.0", "layers.1")
HEADS, HEAD_SIZE = 2, 8
STEP_TOKENS = 64
FIRST_AND_DRAFTS = [7, 8, 9]
"""What prefill samples and drafts after any prompt."""
_starts = itertools.count()


class Engine:
    """One data-parallel rank without a model, with a worker for each of its TP ranks.

    `step` is one engine step.
    """

    def __init__(
        self,
        role: Any,
        num_blocks: int,
        extra_config: dict[str, Any],
        tp_size: int = 1,
        *,
        port: int | None = None,
        head_size: int = HEAD_SIZE,
    ) -> None:
        """`port`: of the side channel, a free one if not given."""
        self.port = port or free_port()
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(self.port)
        self.engine_id = f"{role}-{self.port}-{os.getpid()}-{next(_starts)}"
        config = EngineArgs(
            model=str(PICO),
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=8,
            max_num_batched_tokens=STEP_TOKENS,
            block_size=BLOCK_SIZE,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = num_blocks
        config.cache_config.kv_cache_layout = "LBHNC"
        transfer = kv_transfer_config(
            role, kv_buffer_device="cpu", engine_id=self.engine_id, extra_config=extra_config
        )
        config.kv_transfer_config = KVTransferConfig(**transfer)
        config.parallel_config.tensor_parallel_size = tp_size
        heads = HEADS // tp_size
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=heads, head_size=head_size, dtype=torch.float32
        )
        kv_cache_config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(list(LAYERS), spec)])
        with set_current_vllm_config(config):
            self.scheduler = Scheduler(
                vllm_config=config,
                kv_cache_config=kv_cache_config,
                structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK_SIZE,
                hash_block_size=BLOCK_SIZE,
                log_stats=True,
            )
            self.workers = [self._worker(config, kv_cache_config, rank, tp_size) for rank in range(tp_size)]
        shape = (num_blocks, heads, BLOCK_SIZE, 2 * head_size)
        self.caches = [{name: torch.zeros(shape) for name in LAYERS} for _ in self.workers]
        for worker, caches in zip(self.workers, self.caches, strict=True):
            worker.register_kv_caches(caches)
        scheduler_side: Any = self.scheduler.connector
        metadata = {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        scheduler_side.set_xfer_handshake_metadata_pp_aware(metadata)
        self._aggregator = KVOutputAggregator(tp_size)
        self.failed: set[str] = set()

    @staticmethod
    def _worker(config: Any, kv_cache_config: Any, rank: int, tp_size: int) -> LockstepPushConnector:
        """vLLM's worker asks the process group for its place; here all ranks are in one process."""
        with (
            mock.patch.object(base_worker, "get_tensor_model_parallel_rank", return_value=rank),
            mock.patch.object(base_worker, "get_tensor_model_parallel_world_size", return_value=tp_size),
        ):
            return LockstepPushConnector(config, KVConnectorRole.WORKER, kv_cache_config)

    @property
    def counters(self) -> dict[str, Any]:
        """Of the first TP rank, as a node reads them."""
        assert self.workers[0].connector_worker is not None
        return self.workers[0].connector_worker.counters_snapshot()

    @property
    def received(self) -> int:
        """Requests whose KV has arrived at every TP rank."""
        workers = [worker.connector_worker for worker in self.workers]
        return min(
            worker.counters.snapshot()["received_requests"] for worker in workers if worker is not None
        )

    @property
    def writing(self) -> int:
        """Writes that the first TP rank's worker has in flight."""
        assert self.workers[0].connector_worker is not None
        return len(self.workers[0].connector_worker._writer.transfers)

    @property
    def prepared(self) -> int:
        """Writes that the first TP rank's worker has made and not posted."""
        assert self.workers[0].connector_worker is not None
        return len(self.workers[0].connector_worker._writer.transfers._prepared)

    @property
    def outstanding(self) -> bool:
        """Whether the first TP rank's worker, on prefill, knows of a push."""
        assert self.workers[0].connector_worker is not None
        return self.workers[0].connector_worker._writer.prefill.outstanding

    @property
    def kv_usage(self) -> float:
        return float(self.scheduler.kv_cache_manager.usage)

    @property
    def peer(self) -> PrefillPeer:
        return PrefillPeer(self.engine_id, "127.0.0.1", self.port, len(self.workers))

    def add(self, request_id: str, prompt: Sequence[int], params: dict[str, Any]) -> Request:
        sampling = SamplingParams(max_tokens=1, ignore_eos=True, extra_args={"kv_transfer_params": params})
        request = Request(
            request_id,
            list(prompt),
            sampling,
            None,
            block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        )
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> Any:
        """Returns vLLM's SchedulerOutput of the step."""
        scheduled = self.scheduler.schedule()
        meta = scheduled.kv_connector_metadata
        assert meta is not None
        # Workers of other processes get copies.
        metas = [pickle.loads(pickle.dumps(meta)) for _ in self.workers]
        for worker, copy in zip(self.workers, metas, strict=True):
            worker.handle_preemptions(copy)
            worker.bind_connector_metadata(copy)
        sampled = [self._forward(rid, count) for rid, count in scheduled.num_scheduled_tokens.items()]
        ids = list(scheduled.num_scheduled_tokens)
        outputs = []
        for worker in self.workers:
            worker.start_load_kv(None)  # type: ignore[arg-type]
            worker.wait_for_save()
            self._hand_over(worker.connector_worker)
            results = worker.get_transfer_results(scheduled.finished_req_ids)
            output = ModelRunnerOutput(ids, {rid: index for index, rid in enumerate(ids)}, sampled)
            output.kv_connector_output = KVConnectorOutput(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                invalid_block_ids=worker.get_block_ids_with_load_errors(),
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            )
            outputs.append(output)
            worker.clear_connector_metadata()
        # As an executor of one process or of several does it.
        merged = self._aggregator.aggregate(outputs, 0) if len(outputs) > 1 else outputs[0]
        assert merged is not None
        for core_outputs in self.scheduler.update_from_output(scheduled, merged).values():
            self.failed |= {
                out.request_id for out in core_outputs.outputs if str(out.finish_reason) == "error"
            }
        return scheduled

    def _hand_over(self, worker: Any) -> None:
        """What the runner does once it has sampled and drafted (kv_transfer/handoff/runner.py)."""
        awaited = list(worker.first_tokens_awaited())
        if awaited:
            worker.hand_over(awaited, torch.tensor([FIRST_AND_DRAFTS] * len(awaited)))

    def _forward(self, request_id: str, num_tokens: int) -> list[int]:
        """`update_from_output` has counted the scheduled tokens already when this runs."""
        request = self.scheduler.requests[request_id]
        end = request.num_computed_tokens
        for place in range(end - num_tokens, end):
            for view, number in self._kv(request, place):
                view.fill_(number)
        return FIRST_AND_DRAFTS[:1] if end >= request.num_tokens else []

    def _kv(self, request: Request, place: int) -> Iterator[tuple[torch.Tensor, float]]:
        """Where the KV of one token is, in every layer and head, and what it must be."""
        block = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0][place // BLOCK_SIZE]
        number = value(request.all_token_ids, place)
        heads = (
            (rank, head) for rank in range(len(self.workers)) for head in range(HEADS // len(self.workers))
        )
        for index, (rank, head) in enumerate(heads):
            for layer, cache in enumerate(self.caches[rank].values()):
                yield cache[block, head, place % BLOCK_SIZE], number + layer / 8 + index / 4

    def holds_kv_of(self, request: Request) -> bool:
        """Whether the request's blocks hold what prefill computes for its prompt, all of it."""
        return all(
            bool((view == number).all())
            for place in range(request.num_prompt_tokens)
            for view, number in self._kv(request, place)
        )

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def value(tokens: Sequence[int], place: int) -> float:
    """What the KV of a token comes from; depends on all tokens before it, as attention's does."""
    return float(sum(tokens[: place + 1]) % 10007)


class Pair:
    """A prefill and a decode engine; requests run on both under one id."""

    def __init__(self, num_blocks: int, extra_config: dict[str, Any], *, tp_sizes: Any = (1, 1)) -> None:
        self.prefill = Engine("prefill", num_blocks, extra_config, tp_sizes[0])
        self.decode = Engine("decode", num_blocks, extra_config, tp_sizes[1])
        self.token = "a" * 32

    def add_prefill(self, request_id: str, prompt: Sequence[int], *, hand_off: bool = False) -> Request:
        return self.prefill.add(request_id, prompt, prefill_leg_params(self.token, hand_off=hand_off))

    def add_decode(self, request_id: str, prompt: Sequence[int], *, hand_off: bool = False) -> Request:
        params = decode_leg_params(self.prefill.peer, request_id, self.token, hand_off=hand_off)
        return self.decode.add(request_id, prompt, params)

    def until(self, condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
        """Step both engines until `condition`."""
        end = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < end, "not reached in time"
            self.prefill.step()
            self.decode.step()
            time.sleep(0.001)

    def wait(self, condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
        """Let the writer threads work, without an engine step, until `condition`."""
        end = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < end, "not reached in time"
            time.sleep(0.001)

    @property
    def idle(self) -> bool:
        """Neither side holds a block or remembers a request."""
        engines = (self.prefill, self.decode)
        held = any(engine.scheduler.has_requests() or engine.kv_usage for engine in engines)
        return not held and not self.prefill.prepared

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


@contextmanager
def one_rank_world() -> Iterator[None]:
    """vLLM's process groups of a single rank, which its NIXL worker asks for its place."""
    init_none_hash(sha256)
    config = EngineArgs(model=str(PICO), dtype="float32", max_model_len=64).create_engine_config()
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel(1, 1)
        yield
        destroy_model_parallel()
        destroy_distributed_environment()
