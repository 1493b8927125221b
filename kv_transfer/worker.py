"""The worker side of our connector: one thread that talks to the peers, driven by the two ledgers.

vLLM's engine thread enters through `start_load_kv` and `get_transfer_results` once a step; everything that
NIXL sends or receives for a push happens on the writer thread (vLLM's `nixl-push-writer`, with our loop).
The ledgers and the inboxes are shared under one lock.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import PUSH_REG_NOTIF_PREFIX
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.logger import init_logger

from kv_transfer import decode_ledger, prefill_ledger
from kv_transfer.agent import agent_for_worker
from kv_transfer.config import ConnectorOptions
from kv_transfer.counters import KVCounters
from kv_transfer.host import keep_cpu_affinity
from kv_transfer.metadata import LockstepConnectorMetadata
from kv_transfer.notices import (
    NOTICE_PREFIX,
    Cancel,
    DecodePeer,
    NoticeError,
    Released,
    decode_notice,
    decode_registration,
    encode_notice,
)
from kv_transfer.params import TOKEN_KEY, PrefillPeer
from kv_transfer.peers import PeerLinks
from kv_transfer.stats import CountingStats

logger = init_logger(__name__)

# The writer looks for notifications this often while a request waits for one, and when none does. A look
# costs about 2 µs.
_ACTIVE_POLL_S = 0.001
_IDLE_POLL_S = 0.02
_HEARTBEAT_PREFIX = b"HB:"


class LockstepPushWorker(NixlPushConnectorWorker):
    """vLLM's push worker with exact matching, notices in both directions, deadlines and fencing."""

    def __init__(
        self, vllm_config: Any, engine_id: str, kv_cache_config: Any, options: ConnectorOptions
    ) -> None:
        # Before the base constructor: its failure ends in `__del__`, which calls `shutdown`.
        self._lock = threading.RLock()
        with agent_for_worker(options.nixl_progress_delay_us), keep_cpu_affinity():
            super().__init__(vllm_config, engine_id, kv_cache_config)
        self.counters = KVCounters()
        self.xfer_stats = CountingStats(self.counters)
        self._prefill = prefill_ledger.PrefillLedger(
            options.lockstep_tombstone_ttl_s, options.lockstep_tombstone_limit
        )
        self._decode = decode_ledger.DecodeLedger(
            options.lockstep_registration_deadline_s, options.lockstep_cancel_ack_timeout_s
        )
        self._own_peer = _own_decode_peer(vllm_config, engine_id)
        self._peers = PeerLinks(self, self._on_writer)
        # Work for the writer thread, and results for the engine thread.
        self._outbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._to_release: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._receive_results: queue.SimpleQueue[decode_ledger.Fail | decode_ledger.Done] = (
            queue.SimpleQueue()
        )

    def counters_snapshot(self) -> dict[str, Any]:
        with self._lock:
            requests, blocks = self._decode.quarantined(time.monotonic())
        gauges = {"quarantined_requests": requests, "quarantined_blocks": blocks}
        return self.counters.snapshot() | gauges

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self.counters.kv_bytes_per_block = (
            sum(self.block_len_per_layer) * self._physical_blocks_per_logical_kv_block
        )

    # --- engine thread ---

    def start_load_kv(self, metadata: LockstepConnectorMetadata) -> None:
        now = time.monotonic()
        registrations, metadata.push_registrations = metadata.push_registrations, {}
        finished, metadata.push_finished_blocks = metadata.push_finished_blocks, {}
        super().start_load_kv(metadata)  # keeps vLLM's receive, lease and heartbeat bookkeeping
        with self._lock:
            for request_id, registration in registrations.items():
                num_blocks = sum(len(group) for group in registration["local_block_ids"])
                peer = _prefill_peer(registration)
                self._decode.opened(request_id, peer, registration[TOKEN_KEY], num_blocks, now)
                self._outbox.put(_bind(self._send_registration, request_id, registration))
            for order in metadata.cancels:
                if order.allocated:
                    self._do(self._decode.aborted(order.request_id, order.reason, now))
                else:
                    cancel = decode_ledger.SendCancel(
                        order.request_id, order.peer, order.token, order.reason, registered=False
                    )
                    self._do([cancel])
            for request_id, block_ids in finished.items():
                self._do(self._prefill.finished(request_id, block_ids, metadata.tokens[request_id], now))
            for request_id, reason in metadata.ended.items():
                self._do(self._prefill.ended(request_id, reason, now))
            for request_id, reason in metadata.abandoned.items():
                self._do(self._prefill.abandoned(request_id, reason, now))
        self._push_writer_wake.set()

    def get_transfer_results(self) -> Any:
        receives = list(_drain(self._receive_results))
        for result in receives:
            if isinstance(result, decode_ledger.Done) and result.received:
                # vLLM reports an entry without handles as received, after its post-processing.
                self._recving_transfers.setdefault(result.request_id, [])
        results = super().get_transfer_results()
        for _ in _drain(self._evict_finished_inbox):
            pass  # for vLLM's own writer loop; our ledger learns it from the writes themselves
        self._peers.drop_lost()
        for request_id in _drain(self._to_release):
            # Once only: `_reqs_to_send` holds exactly what was not reported yet.
            if self._reqs_to_send.pop(request_id, None) is not None:
                self._reqs_to_process.discard(request_id)
                results.finished_sending.add(request_id)
        for result in receives:
            if isinstance(result, decode_ledger.Fail):
                self._report_failed(result.request_id, results)
            elif not result.received:
                del self._recving_metadata[result.request_id]
                results.finished_recving.add(result.request_id)
        return results

    def _report_failed(self, request_id: str, results: Any) -> None:
        results.failed_recving.add(request_id)
        # An executor of several processes holds `failed_recving` back until the receive is over
        # (kv_connector/utils.py `KVOutputAggregator`), but not block ids. They fail the request at once and
        # leave its blocks with it; vLLM refuses them for models with several KV cache groups.
        meta = self._recving_metadata.get(request_id)
        if meta is not None and len(self.kv_cache_config.kv_cache_groups) == 1:
            self._invalid_block_ids.put(set(meta.local_block_ids[0]))

    def _reap_expired_send_leases(self, done_sending: set[str]) -> None:
        # vLLM would free the blocks under a write in flight; its end is awaited instead.
        with self._lock:
            held = [request_id for request_id in self._reqs_to_send if self._prefill.is_pushing(request_id)]
            for request_id in held:
                self._reqs_to_send[request_id] = max(
                    self._reqs_to_send[request_id], time.perf_counter() + self._lease_extension
                )
            before = set(done_sending)
            super()._reap_expired_send_leases(done_sending)
            for request_id in done_sending - before:
                self._prefill.lease_expired(request_id, time.monotonic())

    def _pop_done_transfers(self, transfers: Any) -> tuple[set[str], set[str]]:
        done, failed = super()._pop_done_transfers(transfers)
        if transfers is self._sending_transfers:
            now = time.monotonic()
            with self._lock:
                for request_id in done:
                    if request_id in failed or request_id in self._send_failures:
                        self._do(self._prefill.push_failed(request_id, "push_failed", now))
                    elif (registration := self._prefill.pushed(request_id, now)) is not None:
                        self.counters.add("pushed_requests")
                        self.counters.add("pushed_blocks", sum(map(len, registration.block_ids)))
        return done, failed

    def _get_new_notifs(self) -> set[str]:
        # Only heartbeats are forwarded by our loop; completions are counted in the decode ledger.
        while True:
            try:
                notif = self._pending_completion_notifs.get_nowait()
            except queue.Empty:
                return set()
            self._handle_heartbeat(notif[len(_HEARTBEAT_PREFIX) :].decode())

    # --- writer thread ---

    def _push_writer_loop(self) -> None:
        while not self._push_writer_stop.is_set():
            try:
                self._writer_step()
            except Exception:  # the supervisor of this thread: nobody else would see the error
                logger.exception("KV push writer failed; continuing")
            active = self._prefill.outstanding or self._decode.outstanding
            self._push_writer_wake.wait(timeout=_ACTIVE_POLL_S if active else _IDLE_POLL_S)
            self._push_writer_wake.clear()

    def _writer_step(self) -> None:
        for work in _drain(self._outbox):
            work()
        for agent_name, notifs in self.nixl_wrapper.get_new_notifs().items():
            for notif in notifs:
                self._receive(agent_name, notif)
        now = time.monotonic()
        with self._lock:
            self._do(self._prefill.tick(now))
            self._do(self._decode.tick(now))

    def _receive(self, agent_name: str, notif: bytes) -> None:
        now = time.monotonic()
        if notif.startswith(_HEARTBEAT_PREFIX):
            self._pending_completion_notifs.put(notif)
            return
        try:
            with self._lock:
                if notif.startswith(PUSH_REG_NOTIF_PREFIX):
                    registration = decode_registration(notif[len(PUSH_REG_NOTIF_PREFIX) :], now)
                    self._do(self._prefill.registered(registration, now))
                elif notif.startswith(NOTICE_PREFIX):
                    self._receive_notice(agent_name, notif, now)
                else:
                    self._receive_completion(agent_name, notif)
        except NoticeError as error:
            self.counters.add("malformed_notices")
            logger.warning("Dropped a malformed notification from %s: %s", agent_name, error)

    def _receive_notice(self, agent_name: str, notif: bytes, now: float) -> None:
        notice = decode_notice(notif)
        if isinstance(notice, Cancel):
            self._do(self._prefill.cancelled(notice, now))
            return
        actions = self._decode.released(
            notice.request_id,
            notice.token,
            notice.reason,
            agent_name,
            self._num_writers(notice.request_id, notice.writers),
        )
        self._do(actions)

    def _receive_completion(self, agent_name: str, notif: bytes) -> None:
        """vLLM's b"<decode request id>:<prefill TP size>" (push_worker.py `_xfer_blocks`)."""
        request_id, separator, writers = notif.decode("utf-8", "replace").rpartition(":")
        if not separator or not writers.isdigit():
            raise NoticeError("unknown notification")
        if not self._decode.expects(request_id):
            self.counters.add("late_notices")
            return
        self._do(self._decode.completed(request_id, agent_name, self._num_writers(request_id, int(writers))))

    def _num_writers(self, request_id: str, prefill_tp_size: int) -> int:
        """How many prefill workers write here: as push_worker.py `_get_new_notifs` counts them."""
        meta = self._recving_metadata.get(request_id)
        pp_size = meta.pp_size if meta is not None else 1
        return int(pp_size * max(1, prefill_tp_size // self.world_size))

    # --- carrying out what the ledgers say (under the lock; sends are left to the writer thread) ---

    def _do(self, actions: Iterable[prefill_ledger.Action | decode_ledger.Action]) -> None:
        for action in actions:
            match action:
                case prefill_ledger.Push():
                    self._outbox.put(_bind(self._push, action))
                case prefill_ledger.Release():
                    self.counters.add_reason("released", action.reason)
                    self._to_release.put(action.request_id)
                case prefill_ledger.Reply():
                    self.counters.add_reason("refused", action.reason)
                    self._outbox.put(_bind(self._send_released, action))
                case decode_ledger.SendCancel():
                    self.counters.add_reason("cancels_sent", action.reason)
                    self._outbox.put(_bind(self._send_cancel, action))
                case decode_ledger.Fail():
                    self.counters.add_reason("failed", action.reason)
                    logger.error("KV of request %s did not arrive: %s", action.request_id, action.reason)
                    self._receive_results.put(action)
                case decode_ledger.Done():
                    if action.received:
                        self._count_received(action.request_id)
                    self._receive_results.put(action)
        self._push_writer_wake.set()

    def _count_received(self, request_id: str) -> None:
        self.counters.add("received_requests")
        meta = self._recving_metadata.get(request_id)
        if meta is not None:
            self.counters.add("received_blocks", sum(len(group) for group in meta.local_block_ids))

    def _send_registration(self, request_id: str, registration: dict[str, Any]) -> None:
        peer = _prefill_peer(registration)

        def unreachable() -> None:
            with self._lock:
                self._do(self._decode.unreachable(request_id, "prefill_unreachable"))

        def send() -> None:
            with self._lock:
                time_left_s = self._decode.sending(request_id, time.monotonic())
            if time_left_s is None:
                return
            message = registration | {"lockstep_deadline_s": time_left_s}
            data = PUSH_REG_NOTIF_PREFIX + msgspec.msgpack.encode(message)
            if not self._peers.notify(peer.engine_id, data):
                with self._lock:
                    self._do(self._decode.send_failed(request_id, "registration_failed", time.monotonic()))

        self._peers.with_prefill(peer, send, unreachable)

    def _send_cancel(self, action: decode_ledger.SendCancel) -> None:
        notice = Cancel(
            request_id=action.request_id,
            token=action.token,
            reason=action.reason,
            registered=action.registered,
            peer=self._own_peer,
        )

        def failed() -> None:
            self.counters.add("notices_failed")
            if action.registered:
                self._peers.if_gone(action.peer, proven_dead)

        def proven_dead() -> None:
            with self._lock:
                self._do(self._decode.proven_dead(action.request_id))

        def send() -> None:
            if not self._peers.notify(action.peer.engine_id, encode_notice(notice)):
                failed()

        self._peers.with_prefill(action.peer, send, failed)

    def _send_released(self, action: prefill_ledger.Reply) -> None:
        notice = Released(action.request_id, action.token, action.reason, self.world_size)

        def failed() -> None:
            self.counters.add("notices_failed")

        def send() -> None:
            if not self._peers.notify(action.peer.engine_id, encode_notice(notice)):
                failed()

        self._peers.with_decode(action.peer, send, failed)

    def _push(self, action: prefill_ledger.Push) -> None:
        def failed(reason: str) -> None:
            with self._lock:
                self._do(self._prefill.push_failed(action.request_id, reason, time.monotonic()))

        def push() -> None:
            if action.registration.deadline <= time.monotonic():
                failed("deadline")
                return
            try:
                self._do_start_push_kv(action.request_id, action.block_ids, dict(action.registration.payload))
            except Exception:  # the supervisor of one push: vLLM asserts and NIXL raises many kinds here
                logger.exception("Push of request %s could not be started", action.request_id)
            with self._sending_transfers_lock:
                in_flight = action.request_id in self._sending_transfers
                # vLLM notes the failure of a write for its lease; ours is settled here.
                if not in_flight:
                    self._send_failures.discard(action.request_id)
            if not in_flight:
                with self._lock:
                    settled = not self._prefill.is_pushing(action.request_id)
                if not settled:
                    failed("push_failed")

        self._peers.with_decode(action.registration.peer, push, lambda: failed("decode_unreachable"))

    def _on_writer(self, work: Callable[[], None]) -> None:
        self._outbox.put(work)
        self._push_writer_wake.set()


def _bind(function: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    return lambda: function(*arguments)


def _drain(source: "queue.Queue[Any] | queue.SimpleQueue[Any]") -> Iterable[Any]:
    while True:
        try:
            yield source.get_nowait()
        except queue.Empty:
            return


def _prefill_peer(registration: dict[str, Any]) -> PrefillPeer:
    return PrefillPeer(
        engine_id=registration["remote_engine_id"],
        side_channel_host=registration["remote_host"],
        side_channel_port=registration["remote_port"],
        tp_size=registration["remote_tp_size"],
    )


def _own_decode_peer(vllm_config: Any, engine_id: str) -> DecodePeer:
    """This rank's side channel, as base_scheduler.py:76 derives it."""
    parallel_config = vllm_config.parallel_config
    return DecodePeer(
        engine_id=engine_id,
        host=envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
        port=envs.VLLM_NIXL_SIDE_CHANNEL_PORT + parallel_config.data_parallel_index,
        tp_size=parallel_config.tensor_parallel_size,
    )
