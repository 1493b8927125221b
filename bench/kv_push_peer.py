"""One side of the KV push benchmark: a connector's worker in a process of its own, without an engine.

Takes commands as JSON lines on standard input and answers each with one on standard output.
"""

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kv_transfer.config import kv_transfer_config
from kv_transfer.connector import LockstepPushConnector
from kv_transfer.metadata import LockstepConnectorMetadata
from kv_transfer.push_plan import Chunk
from kv_transfer.worker import LockstepPushWorker

PICO = Path(__file__).parent.parent / "models" / "pico"
TOKEN = "b" * 32
BLOCK_SIZE, LAYERS, HEADS, HEAD_SIZE = 32, 16, 2, 128
BLOCK_BYTES = LAYERS * HEADS * BLOCK_SIZE * 2 * HEAD_SIZE * 4
"""1 MiB a block, 64 KiB of it in each layer: what a block of 16 tokens of a 70B model has in bf16."""
_TIMEOUT_S = 60.0


class Peer:
    def __init__(self, role: Any, num_blocks: int) -> None:
        config = EngineArgs(model=str(PICO), dtype="float32", max_model_len=64).create_engine_config()
        config.cache_config.kv_cache_layout = "LBHNC"
        transfer = kv_transfer_config(role, kv_buffer_device="cpu", engine_id=role)
        config.kv_transfer_config = KVTransferConfig(**transfer)
        self._news = threading.Event()
        names = [f"layers.{layer}" for layer in range(LAYERS)]
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32
        )
        kv_cache_config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(names, spec)])
        self.host = os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"]
        self.port = int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"])
        with set_current_vllm_config(config):
            self.worker = self._connect(config, kv_cache_config, names, num_blocks)

    def _connect(self, config: VllmConfig, kv_cache_config: Any, names: list[str], num_blocks: int) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
            initialize_model_parallel(1, 1)
        scheduler_side = LockstepPushConnector(config, KVConnectorRole.SCHEDULER, kv_cache_config)
        worker_side = LockstepPushConnector(config, KVConnectorRole.WORKER, kv_cache_config)
        shape = (num_blocks, HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
        worker_side.register_kv_caches({name: torch.ones(shape) for name in names})
        metadata = worker_side.get_handshake_metadata()
        assert metadata is not None
        scheduler_side.set_xfer_handshake_metadata_pp_aware({(0, 0): metadata})
        assert isinstance(worker_side.connector_worker, LockstepPushWorker)
        worker_side.lockstep_on_news(self._news.set)  # as an engine that is parked meanwhile
        return worker_side.connector_worker

    def register(self, request_id: str, num_blocks: int, prefill_host: str, prefill_port: int) -> None:
        """Decode: hand the first blocks to prefill."""
        blocks = list(range(1, num_blocks + 1))
        remote = {"remote_engine_id": "prefill", "remote_host": prefill_host, "remote_port": prefill_port}
        meta = LockstepConnectorMetadata()
        params = remote | {"remote_block_ids": (), "remote_request_id": request_id}
        meta.add_new_req_to_recv(request_id, (blocks,), params)
        meta.push_registrations[request_id] = remote | {
            "request_id": request_id,
            "lockstep_token": TOKEN,
            "lockstep_start_blocks": [0],
            "lockstep_block_sizes": [BLOCK_SIZE],
            "decode_engine_id": "decode",
            "decode_host": self.host,
            "decode_port": self.port,
            "decode_tp_size": 1,
            "local_block_ids": [blocks],
            "remote_tp_size": 1,
        }
        self.worker.start_load_kv(meta)

    def received(self, request_id: str) -> float:
        """Decode: the monotonic time at which the engine is told that the KV has arrived."""
        while request_id not in self.worker.get_transfer_results().finished_recving:
            assert self._news.wait(_TIMEOUT_S), "the KV has not arrived in time"
            self._news.clear()
        return time.monotonic()

    def push(self, request_id: str, num_blocks: int, num_chunks: int, chunk_s: float, stream: bool) -> float:
        """Prefill: `num_chunks` steps of `chunk_s` seconds; returns when the last one ended."""
        size = num_blocks // num_chunks
        for index in range(num_chunks):
            time.sleep(chunk_s)
            last = index == num_chunks - 1
            if not (stream or last):
                continue
            start = index * size if stream else 0
            blocks = tuple(range(start + 1, (num_blocks if last else start + size) + 1))
            meta = LockstepConnectorMetadata()
            meta.tokens[request_id] = TOKEN
            meta.chunks[request_id] = Chunk((start,), (blocks,), last)
            computed_at = time.monotonic()
            self.worker.start_load_kv(meta)
            self.worker.wait_for_save()
        return computed_at

    def registered(self, request_id: str) -> None:
        """Prefill: wait until decode's registration is here."""
        end = time.monotonic() + _TIMEOUT_S
        while request_id not in self.worker._writer.prefill._pending:
            assert time.monotonic() < end, "no registration came"
            time.sleep(0.0002)

    def bare_write(self, num_blocks: int) -> float:
        """Prefill: seconds that NIXL needs for the same blocks, watched without a pause."""
        worker = self.worker
        ids = [list(range(1, num_blocks + 1))]
        descriptors = [
            worker._compute_desc_ids(ids, worker.dst_num_blocks[engine], ratio, 1)
            for engine, ratio in ((worker.engine_id, 1), ("decode", None))
        ]
        (local,) = worker.src_xfer_handles_by_block_size.values()
        (remote,) = worker.dst_xfer_side_handles["decode"].values()
        begin = time.monotonic()
        handle = worker.nixl_wrapper.make_prepped_xfer("WRITE", local, descriptors[0], remote, descriptors[1])
        worker.nixl_wrapper.transfer(handle)
        while worker.nixl_wrapper.check_xfer_state(handle) != "DONE":
            pass
        seconds = time.monotonic() - begin
        worker.nixl_wrapper.release_xfer_handle(handle)
        return seconds


def memcpy(num_bytes: int) -> float:
    """Seconds of one copy inside this process."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    begin = time.monotonic()
    target.copy_(source)
    return time.monotonic() - begin


def main() -> None:
    role, num_blocks = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    with contextlib.redirect_stdout(sys.stderr):
        os.dup2(2, 1)  # NIXL and vLLM print
        peer = Peer(role, num_blocks)
        methods = {"memcpy": memcpy}
        answers.write(json.dumps("ready") + "\n")
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            call = methods.get(name) or getattr(peer, name)
            answers.write(json.dumps(call(*arguments)) + "\n")
        peer.worker.shutdown()


if __name__ == "__main__":
    main()
