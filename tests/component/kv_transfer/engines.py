"""Two engines that move real KV bytes: vLLM's scheduler and our connector, with arithmetic for a model.

Only the model is missing: a "forward pass" writes, for every scheduled token, a number that depends on the
token, its place and the layer. So decode's blocks can be compared with what prefill must have computed.
"""

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
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


class Engine:
    """One rank without a model. `step` is one engine step."""

    def __init__(self, role: Any, num_blocks: int, extra_config: dict[str, Any]) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = int(sock.getsockname()[1])
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(self.port)
        self.engine_id = f"{role}-{self.port}"
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
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32
        )
        kv_cache_config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(list(LAYERS), spec)])
        self.caches = {name: torch.zeros(num_blocks, HEADS, BLOCK_SIZE, 2 * HEAD_SIZE) for name in LAYERS}
        with set_current_vllm_config(config):
            self.scheduler = Scheduler(
                vllm_config=config,
                kv_cache_config=kv_cache_config,
                structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK_SIZE,
                hash_block_size=BLOCK_SIZE,
                log_stats=True,
            )
            self.connector = LockstepPushConnector(config, KVConnectorRole.WORKER, kv_cache_config)
        self.connector.register_kv_caches(self.caches)
        scheduler_side: Any = self.scheduler.connector
        metadata = self.connector.get_handshake_metadata()
        scheduler_side.set_xfer_handshake_metadata_pp_aware({(0, 0): metadata})
        self.failed: set[str] = set()

    @property
    def counters(self) -> dict[str, Any]:
        assert self.connector.connector_worker is not None
        return self.connector.connector_worker.counters_snapshot()

    @property
    def kv_usage(self) -> float:
        return float(self.scheduler.kv_cache_manager.usage)

    @property
    def peer(self) -> PrefillPeer:
        return PrefillPeer(self.engine_id, "127.0.0.1", self.port, 1)

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
        self.connector.handle_preemptions(scheduled.kv_connector_metadata)
        assert scheduled.kv_connector_metadata is not None
        self.connector.bind_connector_metadata(scheduled.kv_connector_metadata)
        sampled = [self._forward(rid, count) for rid, count in scheduled.num_scheduled_tokens.items()]
        self.connector.start_load_kv(None)  # type: ignore[arg-type]
        self.connector.wait_for_save()
        results = self.connector.get_transfer_results(scheduled.finished_req_ids)
        report = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.connector.get_block_ids_with_load_errors(),
        )
        self.connector.clear_connector_metadata()
        ids = list(scheduled.num_scheduled_tokens)
        output = ModelRunnerOutput(ids, {rid: index for index, rid in enumerate(ids)}, sampled)
        output.kv_connector_output = report
        for core_outputs in self.scheduler.update_from_output(scheduled, output).values():
            self.failed |= {
                out.request_id for out in core_outputs.outputs if str(out.finish_reason) == "error"
            }
        return scheduled

    def _forward(self, request_id: str, num_tokens: int) -> list[int]:
        """`update_from_output` has counted the scheduled tokens already when this runs."""
        request = self.scheduler.requests[request_id]
        end = request.num_computed_tokens
        for place in range(end - num_tokens, end):
            for view, number in zip(
                self._views(request, place), values(request.all_token_ids, place), strict=True
            ):
                view.fill_(number)
        return [7] if end >= request.num_tokens else []

    def _views(self, request: Request, place: int) -> list[torch.Tensor]:
        """The KV of one token in every layer."""
        block = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0][place // BLOCK_SIZE]
        return [cache[block, :, place % BLOCK_SIZE] for cache in self.caches.values()]

    def holds_kv_of(self, request: Request) -> bool:
        """Whether the request's blocks hold what prefill computes for its prompt, all of it."""
        return all(
            bool((view == number).all())
            for place in range(request.num_prompt_tokens)
            for view, number in zip(
                self._views(request, place), values(request.all_token_ids, place), strict=True
            )
        )

    def close(self) -> None:
        self.connector.shutdown()
        self.scheduler.shutdown()


def values(tokens: Sequence[int], place: int) -> list[float]:
    """What each layer's KV holds for a token; depends on all tokens before it, as attention's does."""
    return [float(sum(tokens[: place + 1]) % 10007 + layer) for layer in range(len(LAYERS))]


class Pair:
    """A prefill and a decode engine; requests run on both under one id."""

    def __init__(self, num_blocks: int, extra_config: dict[str, Any]) -> None:
        self.prefill = Engine("prefill", num_blocks, extra_config)
        self.decode = Engine("decode", num_blocks, extra_config)
        self.token = "a" * 32

    def add_prefill(self, request_id: str, prompt: Sequence[int]) -> Request:
        return self.prefill.add(request_id, prompt, prefill_leg_params(self.token))

    def add_decode(self, request_id: str, prompt: Sequence[int]) -> Request:
        params = decode_leg_params(self.prefill.peer, request_id, self.token)
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
        return not any(engine.scheduler.has_requests() or engine.kv_usage for engine in engines)

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
