"""The push writer: everything that a worker's second thread sends and receives, as the two ledgers say.

The ledgers and the inboxes are shared with vLLM's engine thread under one lock. Nothing is sent while it is
held: sends wait in the outbox for the writer thread.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import PUSH_REG_NOTIF_PREFIX
from vllm.logger import init_logger

from kv_transfer import decode_ledger, prefill_ledger
from kv_transfer.config import ConnectorOptions
from kv_transfer.counters import KVCounters
from kv_transfer.notices import (
    Ask,
    Cancel,
    Completed,
    DecodePeer,
    Failing,
    Held,
    Notice,
    NoticeError,
    Released,
    decode_notice,
    decode_registration,
    encode_notice,
)
from kv_transfer.params import PrefillPeer
from kv_transfer.peers import PeerLinks, Work
from kv_transfer.push_plan import Chunk, GroupLayout
from kv_transfer.stall import Question
from kv_transfer.step_queue import StepQueue
from kv_transfer.transfers import Transfers

logger = init_logger(__name__)

HEARTBEAT_PREFIX = b"HB:"

# The writer looks at NIXL this often while something is outstanding: a write, the device, a notification. A
# look costs about 2 µs, a pause some 20 µs. A young write is looked at after each further quarter of its age.
_ACTIVE_POLL_S = 0.0005
_SOONEST_POLL_S = 0.00005
_IDLE_POLL_S = 0.05
# An engine that nobody wakes looks each millisecond itself.
_UNWOKEN_POLL_S = 0.001

Action = prefill_ledger.Action | decode_ledger.Action


class PushWriter:
    """What `LockstepPushWorker` and its writer thread share.

    `worker` is vLLM's NIXL worker; `consumer`: it is decode's.
    """

    def __init__(
        self,
        worker: Any,
        own_peer: DecodePeer,
        layout: Sequence[GroupLayout],
        options: ConnectorOptions,
        counters: KVCounters,
        *,
        consumer: bool,
    ) -> None:
        self.lock = threading.RLock()
        self.prefill = prefill_ledger.PrefillLedger(
            layout, options.lockstep_tombstone_ttl_s, options.lockstep_tombstone_limit
        )
        self.decode = decode_ledger.DecodeLedger(
            options.lockstep_registration_deadline_s, options.lockstep_cancel_ack_timeout_s
        )
        self.steps = StepQueue()
        self.transfers = Transfers(worker)
        self.peers = PeerLinks(worker, self._enqueue, self.transfers.drop_prepared_to, consumer=consumer)
        # For the engine thread: prefill's blocks to give back, and decode's receives that ended.
        self.to_release: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.receive_results: queue.SimpleQueue[decode_ledger.Fail | decode_ledger.Done] = queue.SimpleQueue()
        self.offered: queue.SimpleQueue[str] = queue.SimpleQueue()  # what prefill holds computed for decode
        self.on_news: Callable[[], None] | None = None  # called after each of them
        self._worker = worker
        self._consumer = consumer
        self._world_size: int = worker.world_size
        self._own_peer = own_peer
        self._counters = counters
        self._outbox: queue.SimpleQueue[Work] = queue.SimpleQueue()

    def step(self) -> None:
        """One round of the writer thread."""
        for agent_name, notifs in self._worker.nixl_wrapper.get_new_notifs().items():
            for notif in notifs:
                self._receive(agent_name, notif)
        now = time.monotonic()
        with self.lock:
            self.steps.advance()
            self.do(self.prefill.tick(now))
            self.do(self.decode.tick(now))
        self._work_off()
        self._settle_writes()
        if not self._consumer:
            self.peers.drop_lost()  # so that decode can be told of the write that failed
        self._work_off()

    def _work_off(self) -> None:
        for work in drain(self._outbox):
            work()

    def poll_interval_s(self) -> float:
        with self.lock:
            writing = bool(self.transfers or self.steps)
            active = self.prefill.outstanding or self.decode.outstanding
        if not writing and not active:
            return _IDLE_POLL_S
        if self.on_news is None:
            return _ACTIVE_POLL_S if writing else _UNWOKEN_POLL_S
        return min(_ACTIVE_POLL_S, max(_SOONEST_POLL_S, self.transfers.seconds_since_post() / 4))

    def register(self, request_id: str, registration: dict[str, Any]) -> None:
        """Send vLLM's registration, with the deadline in it, once prefill is connected."""
        self._enqueue(lambda: self._send_registration(request_id, registration))

    def do(self, actions: Iterable[Action]) -> None:
        """Carry out what a ledger says; with the lock held, on any thread."""
        for action in actions:
            match action:
                case prefill_ledger.Write():
                    self._enqueue(_bind(self._write, action))
                case prefill_ledger.Complete():
                    self._count_pushed(action)
                    token = action.registration.token
                    notice = Completed(action.request_id, token, self._world_size, action.payload)
                    self._enqueue(_bind(self._send_to_decode, action.registration.peer, notice))
                case prefill_ledger.Release():
                    if action.reason == prefill_ledger.PUSHED:
                        # Behind the notice: the engine that it wakes would take turns with this thread.
                        self._enqueue(_bind(self._tell, self.to_release, action.request_id))
                    else:
                        self._counters.add_reason("released", action.reason)
                        self._tell(self.to_release, action.request_id)
                case prefill_ledger.Warn():
                    warning = Failing(action.request_id, action.token, action.reason)
                    self._enqueue(_bind(self._send_to_decode, action.peer, warning))
                case prefill_ledger.Offer():
                    offer = Held(action.request_id, action.token)
                    self._enqueue(_bind(self._send_to_decode, action.peer, offer))
                case prefill_ledger.Reply():
                    self._counters.add_reason("refused", action.reason)
                    answer = Released(action.request_id, action.token, action.reason, self._world_size)
                    self._enqueue(_bind(self._send_to_decode, action.peer, answer))
                case decode_ledger.SendCancel():
                    self._counters.add_reason("cancels_sent", action.reason)
                    self._enqueue(_bind(self._send_cancel, action))
                case decode_ledger.Fail():
                    self._counters.add_reason("failed", action.reason)
                    logger.error("KV of request %s did not arrive: %s", action.request_id, action.reason)
                    self._tell(self.receive_results, action)
                case decode_ledger.Done():
                    if action.received:
                        self._count_received(action)
                    self._tell(self.receive_results, action)

    def ask(self, questions: Iterable[Question]) -> None:
        """Decode stands still: ask prefill about these. With the lock held, on any thread."""
        for question in questions:
            if not question.allocated or self.decode.may_be_revoked(question.request_id):
                self._counters.add("questions_sent")
                self._enqueue(_bind(self._send_question, question))

    def foresee(self, chunks: Iterable[tuple[str, str, Chunk]]) -> None:
        """Prefill computes these, each (request_id, token, chunk), now: get their writes ready meanwhile."""

        def prepare(request_id: str, token: str, chunk: Chunk) -> None:
            with self.lock:
                foreseen = self.prefill.foreseen(request_id, token, chunk)
            if foreseen is not None and self.peers.is_connected(foreseen[1].peer.engine_id):
                self.transfers.prepare(request_id, *foreseen)

        for chunk in chunks:
            self._enqueue(_bind(prepare, *chunk))

    def unforesee(self, chunks: Iterable[tuple[str, str, Chunk]]) -> None:
        """They are computed, and the writes of those that were to be written are enqueued."""
        self._enqueue(_bind(self.transfers.drop_prepared, [request_id for request_id, *_ in chunks]))

    def has_news(self) -> bool:
        """Whether there is something for the engine thread to take."""
        return not (self.receive_results.empty() and self.to_release.empty() and self.offered.empty())

    def _tell(self, news: "queue.SimpleQueue[Any]", item: Any) -> None:
        news.put(item)
        if self.on_news is not None:
            self.on_news()

    def _receive(self, agent_name: str, notif: bytes) -> None:
        now = time.monotonic()
        if notif.startswith(HEARTBEAT_PREFIX):
            self._worker._pending_completion_notifs.put(notif)
            return
        try:
            with self.lock:
                if notif.startswith(PUSH_REG_NOTIF_PREFIX):
                    registration = decode_registration(notif[len(PUSH_REG_NOTIF_PREFIX) :], now)
                    self.do(self.prefill.registered(registration, now))
                else:
                    self._receive_notice(agent_name, decode_notice(notif), now)
        except NoticeError as error:
            self._counters.add("malformed_notices")
            logger.warning("Dropped a malformed notification from %s: %s", agent_name, error)

    def _receive_notice(self, agent_name: str, notice: Notice, now: float) -> None:
        match notice:
            case Cancel():
                self.do(self.prefill.cancelled(notice, now))
            case Ask():
                self.do(self.prefill.asked(notice, now))
            case Held():
                # The scheduler knows whether it still waits; what blocks it gets it registers with its token.
                self._tell(self.offered, notice.request_id)
            case Failing():
                self.do(self.decode.failing(notice))
            case Released():
                writers = self._num_writers(notice.request_id, notice.writers)
                self.do(self.decode.released(notice, agent_name, writers, now))
            case Completed():
                if not self.decode.expects(notice.request_id):
                    self._counters.add("late_notices")
                writers = self._num_writers(notice.request_id, notice.writers)
                self.do(self.decode.completed(notice, agent_name, writers, now))

    def _num_writers(self, request_id: str, prefill_tp_size: int) -> int:
        """How many prefill workers write here: as push_worker.py `_get_new_notifs` counts them."""
        meta = self._worker._recving_metadata.get(request_id)
        pp_size = meta.pp_size if meta is not None else 1
        return int(pp_size * max(1, prefill_tp_size // self._world_size))

    def _settle_writes(self) -> None:
        for done in self.transfers.poll():
            self._counters.add("pushed_chunks")
            if done.write.streamed:
                self._counters.add("streamed_chunks")
            if done.failed:
                self.peers.lost(done.write.registration.peer.engine_id)
            else:
                self._counters.observe("write_seconds", done.seconds)
                self._counters.observe("write_bytes", done.num_bytes)
            with self.lock:
                failure = "push_failed" if done.failed else None
                self.do(self.prefill.settled(done.write, done.num_bytes, failure, time.monotonic()))

    def _count_pushed(self, action: prefill_ledger.Complete) -> None:
        self._counters.add("pushed_requests")
        self._counters.add("pushed_blocks", sum(map(len, action.registration.block_ids)))
        self._counters.observe("push_tail_seconds", action.tail_s)

    def _count_received(self, done: decode_ledger.Done) -> None:
        self._counters.add("received_requests")
        self._counters.observe("receive_seconds", done.seconds)
        meta = self._worker._recving_metadata.get(done.request_id)
        if meta is not None:
            self._counters.add("received_blocks", sum(len(group) for group in meta.local_block_ids))

    def _send_registration(self, request_id: str, registration: dict[str, Any]) -> None:
        peer = prefill_peer(registration)

        def unreachable() -> None:
            with self.lock:
                self.do(self.decode.unreachable(request_id, "prefill_unreachable"))

        def send() -> None:
            with self.lock:
                time_left_s = self.decode.sending(request_id, time.monotonic())
            if time_left_s is None:
                return
            message = registration | {"lockstep_deadline_s": time_left_s}
            data = PUSH_REG_NOTIF_PREFIX + msgspec.msgpack.encode(message)
            if not self.peers.notify(peer.engine_id, data):
                with self.lock:
                    self.do(self.decode.send_failed(request_id, "registration_failed", time.monotonic()))

        self.peers.with_prefill(peer, send, unreachable)

    def _send_cancel(self, action: decode_ledger.SendCancel) -> None:
        notice = Cancel(
            request_id=action.request_id,
            token=action.token,
            reason=action.reason,
            registered=action.registered,
            peer=self._own_peer,
        )

        def failed() -> None:
            self._counters.add("notices_failed")
            probe()

        def probe() -> None:
            if action.registered:
                self.peers.if_gone(action.peer, proven_dead)

        def proven_dead() -> None:
            with self.lock:
                self.do(self.decode.proven_dead(action.request_id))

        def send() -> None:
            if not self.peers.notify(action.peer.engine_id, encode_notice(notice)):
                failed()
            elif action.repeated and action.peer.tp_size == 1:
                probe()  # NIXL may take notices for a process that is gone

        self.peers.with_prefill(action.peer, send, failed)

    def _send_question(self, question: Question) -> None:
        """No answer is one too: nothing more is done if it cannot be sent."""
        notice = Ask(question.request_id, question.token, question.allocated, self._own_peer)
        self._send(self.peers.with_prefill, question.peer, notice)

    def _send_to_decode(self, peer: DecodePeer, notice: Notice) -> None:
        self._send(self.peers.with_decode, peer, notice)

    def _send(self, connected: Callable[[Any, Work, Work], None], peer: Any, notice: Notice) -> None:
        """Once; what could not be sent is counted."""

        def failed() -> None:
            self._counters.add("notices_failed")

        def send() -> None:
            if not self.peers.notify(peer.engine_id, encode_notice(notice)):
                failed()

        connected(peer, send, failed)

    def _write(self, write: prefill_ledger.Write) -> None:
        def post() -> None:
            with self.lock:
                wanted, actions = self.prefill.starting(write, time.monotonic())
                self.do(actions)
            if wanted:
                self.transfers.post(write)

        def unreachable() -> None:
            with self.lock:
                self.do(self.prefill.settled(write, 0, "decode_unreachable", time.monotonic()))

        self.peers.with_decode(write.registration.peer, post, unreachable)

    def _enqueue(self, work: Work) -> None:
        self._outbox.put(work)
        self._worker._push_writer_wake.set()


def _bind(function: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    return lambda: function(*arguments)


def drain(source: "queue.Queue[Any] | queue.SimpleQueue[Any]") -> Iterator[Any]:
    """Everything that is in the queue now."""
    while True:
        try:
            yield source.get_nowait()
        except queue.Empty:
            return


def prefill_peer(registration: dict[str, Any]) -> PrefillPeer:
    """The prefill rank that vLLM's registration goes to."""
    return PrefillPeer(
        engine_id=registration["remote_engine_id"],
        side_channel_host=registration["remote_host"],
        side_channel_port=registration["remote_port"],
        tp_size=registration["remote_tp_size"],
    )
