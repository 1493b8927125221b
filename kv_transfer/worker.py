"""The worker side of our connector: vLLM's engine thread comes in here, once a step.

What is sent and received happens on the writer thread (vLLM's `nixl-push-writer`), see kv_transfer/writer.py.
"""

import queue
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.logger import init_logger

from kv_transfer import decode_ledger, prefill_ledger
from kv_transfer.agent import agent_for_worker
from kv_transfer.config import ConnectorOptions
from kv_transfer.counters import KVCounters
from kv_transfer.groups import group_layouts
from kv_transfer.handoff.worker import HandOffWorker
from kv_transfer.host import keep_cpu_affinity
from kv_transfer.metadata import CancelOrder, LockstepConnectorMetadata
from kv_transfer.notices import DecodePeer
from kv_transfer.params import TOKEN_KEY
from kv_transfer.push_plan import Chunk
from kv_transfer.stats import CountingStats
from kv_transfer.writer import HEARTBEAT_PREFIX, PushWriter, drain, prefill_peer

logger = init_logger(__name__)

_SWITCH_S = 0.0001


class LockstepPushWorker(HandOffWorker, NixlPushConnectorWorker):
    """vLLM's push worker with exact matching, notices in both directions, deadlines and fencing."""

    def __init__(
        self, vllm_config: Any, engine_id: str, kv_cache_config: Any, options: ConnectorOptions
    ) -> None:
        with agent_for_worker(options.nixl_progress_delay_us), keep_cpu_affinity():
            super().__init__(vllm_config, engine_id, kv_cache_config)
        self.counters = KVCounters()
        self.xfer_stats = CountingStats(self.counters)
        own_peer = _own_decode_peer(vllm_config, engine_id)
        layout = group_layouts(vllm_config, kv_cache_config)
        self._consumer = vllm_config.kv_transfer_config.kv_role == "kv_consumer"
        self._writer = PushWriter(self, own_peer, layout, options, self.counters, consumer=self._consumer)
        self._revoked: set[str] = set()  # for the scheduler, as `take_answers` says
        self._chunks: list[tuple[str, str, Chunk]] = []  # (request_id, token, chunk) of the step under way
        # Model runner V2 saves before its drafter runs (gpu/kv_connector.py `post_forward`), and the drafter
        # writes the KV of its own layers.
        self._saved_is_whole = not (
            vllm_config.use_v2_model_runner and vllm_config.speculative_config is not None
        )

    def counters_snapshot(self) -> dict[str, Any]:
        """`KVCounters.snapshot`, and as gauges the blocks and requests in quarantine and the leases.

        For any thread. vLLM reaps leases within engine steps only, so one that makes none has overdue ones.
        """
        with self._writer.lock:
            requests, blocks = self._writer.decode.quarantined(time.monotonic())
        now_s = time.perf_counter()  # the clock of vLLM's leases (base_worker.py:3024)
        gauges = {
            "quarantined_requests": requests,
            "quarantined_blocks": blocks,
            "leases_held": len(self._reqs_to_send),
            "leases_overdue": sum(until_s <= now_s for until_s in list(self._reqs_to_send.values())),
        }
        return self.counters.snapshot() | gauges

    def has_news(self) -> bool:
        """Whether `get_transfer_results` has something new to say; heartbeats and leases wait for a step."""
        return self._writer.has_news()

    def on_news(self, wake: Callable[[], None]) -> None:
        """Call `wake`, on any thread, after each piece of news."""
        self._writer.on_news = wake
        # Python lets a thread that computes keep the others waiting for 5 ms, and the writer is one of them.
        sys.setswitchinterval(_SWITCH_S)

    def announce(self, engine_ids: Iterable[str]) -> None:
        """Prefill: reach these decode engines only; without a call any that registers."""
        self._writer.peers.announced = frozenset(engine_ids)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self.counters.kv_bytes_per_block = (
            sum(self.block_len_per_layer) * self._physical_blocks_per_logical_kv_block
        )

    def handle_preemptions(self, metadata: LockstepConnectorMetadata) -> None:
        """Before the forward pass: blocks that this step may give to another request.

        Nothing is waited for: writes in flight read what is there, decode uses nothing before the last
        notice, and no block is written anew before the old writes have ended.
        """
        self.flush_chunks()
        preempted, metadata.preempted = metadata.preempted, []
        with self._writer.lock:
            for request_id in preempted:
                if self._writer.prefill.is_pushing(request_id):
                    self.counters.add("restarted_pushes")
                self._writer.steps.put(partial(self._writer.prefill.preempted, request_id))

    def start_load_kv(self, metadata: LockstepConnectorMetadata) -> None:
        self.handle_preemptions(metadata)
        registrations, metadata.push_registrations = metadata.push_registrations, {}
        finished, metadata.push_finished_blocks = metadata.push_finished_blocks, {}
        super().start_load_kv(metadata)  # keeps vLLM's receive, lease and heartbeat bookkeeping
        with self._writer.lock:
            self._start_receives(registrations, metadata.cancels)
            self._writer.ask(metadata.questions)
            self._writer.steps.put(partial(self._end_prefills, finished, metadata))
        self._chunks = [
            (request_id, metadata.tokens[request_id], chunk) for request_id, chunk in metadata.chunks.items()
        ]
        self._writer.foresee(self._chunks)
        self._first_tokens = dict(metadata.first_tokens)

    def wait_for_save(self) -> None:
        """The step's forward passes have been launched; with V1 those of the drafter too.

        What `hand_over` will bring goes first.
        """
        if self._saved_is_whole and not self._first_tokens:
            self.flush_chunks()

    def flush_chunks(self) -> None:
        """Hand the chunks of the last step over: they are computed once the device has done what it has."""
        if not self._chunks:
            return
        chunks, self._chunks = self._chunks, []
        self.once_computed(partial(self._add_chunks, chunks))

    def _start_receives(self, registrations: dict[str, dict[str, Any]], cancels: list[CancelOrder]) -> None:
        now = time.monotonic()
        for request_id, registration in registrations.items():
            num_blocks = sum(len(group) for group in registration["local_block_ids"])
            peer = prefill_peer(registration)
            self._writer.decode.opened(request_id, peer, registration[TOKEN_KEY], num_blocks, now)
            self._writer.register(request_id, registration)
        for order in cancels:
            if order.allocated:
                self._writer.do(self._writer.decode.aborted(order.request_id, order.reason, now))
            else:
                cancel = decode_ledger.SendCancel(
                    order.request_id, order.peer, order.token, order.reason, registered=False
                )
                self._writer.do([cancel])

    def _end_prefills(self, finished: dict[str, Any], metadata: LockstepConnectorMetadata) -> None:
        now, writer = time.monotonic(), self._writer
        for request_id, groups in finished.items():
            block_ids = tuple(tuple(group) for group in groups)
            writer.do(writer.prefill.finished(request_id, block_ids, metadata.tokens[request_id], now))
        for request_id, reason in metadata.ended.items():
            writer.do(writer.prefill.ended(request_id, reason, now))
        for request_id, reason in metadata.abandoned.items():
            writer.do(writer.prefill.abandoned(request_id, reason, now))

    def _add_chunks(self, chunks: list[tuple[str, str, Chunk]]) -> None:
        now = time.monotonic()
        for request_id, token, chunk in chunks:
            self._writer.do(self._writer.prefill.computed(request_id, token, chunk, now))
        self._writer.unforesee(chunks)

    def get_transfer_results(self) -> Any:
        receives = [
            known for result in drain(self._writer.receive_results) for known in self._of_known_peer(result)
        ]
        for result in receives:
            if isinstance(result, decode_ledger.Done) and result.received:
                # vLLM reports an entry without handles as received, after its post-processing.
                self._recving_transfers.setdefault(result.request_id, [])
                if result.payload:
                    self._payloads[result.request_id] = result.payload
        # Not the push worker's: it wakes the writer thread, which then takes turns with this one for nothing,
        # and what else it adds is about writes that our writer awaits itself.
        results = NixlBaseConnectorWorker.get_transfer_results(self)
        if self._consumer:
            self._writer.peers.drop_lost()
        for request_id in drain(self._writer.to_release):
            # Once only: `_reqs_to_send` holds exactly what was not reported yet.
            if self._reqs_to_send.pop(request_id, None) is not None:
                self._reqs_to_process.discard(request_id)
                results.finished_sending.add(request_id)
        for result in receives:
            if isinstance(result, decode_ledger.Fail):
                self._report_failed(result, results)
            elif not result.received:
                del self._recving_metadata[result.request_id]
                results.finished_recving.add(result.request_id)
        return results

    def take_answers(self) -> tuple[frozenset[str], frozenset[str]]:
        """Decode: requests that prefill has offered, and those that it gave up, since the last call."""
        revoked, self._revoked = self._revoked, set()
        return frozenset(drain(self._writer.offered)), frozenset(revoked)

    def _of_known_peer(
        self, result: decode_ledger.Fail | decode_ledger.Done
    ) -> list[decode_ledger.Fail | decode_ledger.Done]:
        """The result as vLLM can take it.

        It raises, and ends the engine, for KV of a prefill engine that this rank never shook hands with
        (another TP rank's registration was enough).
        """
        if not isinstance(result, decode_ledger.Done) or not result.received:
            return [result]
        meta = self._recving_metadata[result.request_id]
        assert meta.remote is not None
        assert self.transfer_topo is not None
        try:
            self.transfer_topo.get_engine_info(meta.remote.engine_id)
        except KeyError:
            self.counters.add_reason("failed", "prefill_unknown")
            return [
                decode_ledger.Fail(result.request_id, "prefill_unknown"),
                decode_ledger.Done(result.request_id, received=False),
            ]
        return [result]

    def _report_failed(self, failed: decode_ledger.Fail, results: Any) -> None:
        request_id = failed.request_id
        if failed.reason == prefill_ledger.REVOKED:
            self._revoked.add(request_id)
        results.failed_recving.add(request_id)
        # An executor of several processes holds `failed_recving` back until the receive is over
        # (kv_connector/utils.py `KVOutputAggregator`), but not block ids. They fail the request at once and
        # leave its blocks with it; vLLM refuses them for models with several KV cache groups.
        meta = self._recving_metadata.get(request_id)
        if meta is not None and len(self.kv_cache_config.kv_cache_groups) == 1:
            self._invalid_block_ids.put(set(meta.local_block_ids[0]))

    def _reap_expired_send_leases(self, done_sending: set[str]) -> None:
        # vLLM would free the blocks under a write in flight; its end is awaited instead.
        with self._writer.lock:
            held = [
                request_id for request_id in self._reqs_to_send if self._writer.prefill.is_pushing(request_id)
            ]
            for request_id in held:
                self._reqs_to_send[request_id] = max(
                    self._reqs_to_send[request_id], time.perf_counter() + self._lease_extension
                )
            before = set(done_sending)
            super()._reap_expired_send_leases(done_sending)
            for request_id in done_sending - before:
                self.counters.add("leases_expired")
                self._writer.prefill.lease_expired(request_id, time.monotonic())

    def _xfer_blocks(self, *args: Any, **kwargs: Any) -> None:
        """Keep the handle that vLLM posts: it is ours to await, on the writer thread."""
        request_id = kwargs["request_id"]
        handle = super()._xfer_blocks(*args, **kwargs)
        with self._sending_transfers_lock:
            failed = request_id in self._send_failures
            self._send_failures.discard(request_id)
        self._writer.transfers.made(handle, failed=failed)

    def _ensure_handshake(
        self,
        engine_id: str,
        host: str,
        port: int,
        tp_size: int,
        dcp_size: int = 1,
        pp_size: int = 1,
        notif_agents_only: bool = False,
    ) -> Any:
        """Decode never writes, whoever shakes hands: it needs no descriptors of prefill's whole pool."""
        notices_only = notif_agents_only or self._consumer
        return super()._ensure_handshake(engine_id, host, port, tp_size, dcp_size, pp_size, notices_only)

    def _engines_with_inflight_transfers(self) -> set[str]:
        return set(super()._engines_with_inflight_transfers()) | self._writer.transfers.engines()

    def shutdown(self) -> None:
        self._push_writer_stop.set()
        self._push_writer_wake.set()
        if self._push_writer_thread is not None:
            self._push_writer_thread.join(timeout=2)
        if (writer := getattr(self, "_writer", None)) is not None:
            writer.transfers.release_all()
        super().shutdown()

    def _get_new_notifs(self) -> set[str]:
        # Only heartbeats are forwarded by our loop; completions are counted in the decode ledger.
        while True:
            try:
                notif = self._pending_completion_notifs.get_nowait()
            except queue.Empty:
                return set()
            self._handle_heartbeat(notif[len(HEARTBEAT_PREFIX) :].decode())

    def _push_writer_loop(self) -> None:
        """The body of vLLM's writer thread."""
        while not self._push_writer_stop.is_set():
            try:
                self._writer.step()
            except Exception:  # the supervisor of this thread: nobody else would see the error
                logger.exception("KV push writer failed; continuing")
            self._push_writer_wake.wait(timeout=self._writer.poll_interval_s())
            self._push_writer_wake.clear()


def _own_decode_peer(vllm_config: Any, engine_id: str) -> DecodePeer:
    """This rank's side channel, as base_scheduler.py:76 derives it."""
    parallel_config = vllm_config.parallel_config
    return DecodePeer(
        engine_id=engine_id,
        host=envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
        port=envs.VLLM_NIXL_SIDE_CHANNEL_PORT + parallel_config.data_parallel_index,
        tp_size=parallel_config.tensor_parallel_size,
    )
