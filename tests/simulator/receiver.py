"""The worker side of the connector and the prefill peers behind it, without a network.

The decode ledger is the real one (kv_transfer/decode_ledger.py) on a clock of engine steps. Peers write KV
when a push would, also late, after a cancel, until they say that they write no more.
"""

from dataclasses import dataclass
from typing import Any, Literal

from simulator.model import WRONG, Conversation
from simulator.shape import BLOCK_SIZE, Shape
from simulator.worker import Memory
from vllm.utils.math_utils import cdiv
from vllm.v1.outputs import KVConnectorOutput

from kv_transfer.decode_ledger import DecodeLedger, Done, Fail, SendCancel
from kv_transfer.handoff import codec
from kv_transfer.handoff.worker_meta import HandOffWorkerMetadata
from kv_transfer.notices import Completed, Failing, Released
from kv_transfer.params import TOKEN_KEY, PrefillPeer

DEADLINE_STEPS = 25
CANCEL_ACK_STEPS = 6

WRITER = "prefill"
"""The agent of the one prefill worker."""

Outcome = Literal["complete", "fail", "fail_early", "silent", "unreachable"]


@dataclass(frozen=True, slots=True)
class Push:
    """What prefill will do for one attempt.

    Attributes:
        delay: steps from the registration to the end of the push.
        outcome: all blocks and the notice; half of them and a notice that no more will come; the same with a
            first notice while writes go on; nothing; no connection.
        ack_delay: steps from a cancel to the answer; writes go on until then.
    """

    delay: int = 2
    outcome: Outcome = "complete"
    ack_delay: int = 1


@dataclass(slots=True)
class _Expected:
    push: Push
    conversation: Conversation
    num_tokens: int
    block_ids: list[int]
    token: str
    due: int
    released: int | None = None


class Receiver:
    """One rank's."""

    def __init__(self, shape: Shape, memory: Memory) -> None:
        self._shape = shape
        self._memory = memory
        self._ledger = DecodeLedger(DEADLINE_STEPS, CANCEL_ACK_STEPS)
        self._expected: dict[str, _Expected] = {}
        self._block_ids: dict[str, list[int]] = {}
        self._report = KVConnectorOutput(finished_recving=set())
        self._payloads: dict[str, bytes] = {}
        self._offered: set[str] = set()
        self._revoked: set[str] = set()

    @property
    def outstanding(self) -> bool:
        return self._ledger.outstanding or bool(self._expected)

    def step(self, meta: Any, attempts: dict[str, tuple[Conversation, int, Push]], now: int) -> None:
        """Take a step's orders (kv_transfer/worker.py `start_load_kv`), then let the peers act."""
        for request_id, registration in meta.push_registrations.items():
            conversation, num_tokens, push = attempts[request_id]
            (block_ids,) = registration["local_block_ids"]
            token = registration.get(TOKEN_KEY, "")
            peer = PrefillPeer(registration["remote_engine_id"], "127.0.0.1", registration["remote_port"], 1)
            self._ledger.opened(request_id, peer, token, len(block_ids), now)
            self._block_ids[request_id] = list(block_ids)
            if push.outcome == "unreachable":
                self._do(self._ledger.unreachable(request_id, "unreachable"), now)
            elif self._ledger.sending(request_id, now) is not None:
                self._expected[request_id] = _Expected(
                    push, conversation, num_tokens, list(block_ids), token, now + push.delay
                )
        for order in getattr(meta, "cancels", ()):
            if order.allocated:
                self._do(self._ledger.aborted(order.request_id, order.reason, now), now)
        for request_id, expected in list(self._expected.items()):
            self._let_peer_act(request_id, expected, now)
        self._do(self._ledger.tick(now), now)

    def take_report(self) -> KVConnectorOutput:
        """What became of receives since the last call (kv_transfer/worker.py `get_transfer_results`)."""
        report, self._report = self._report, KVConnectorOutput(finished_recving=set())
        if self._payloads or self._offered or self._revoked:
            report.kv_connector_worker_meta = HandOffWorkerMetadata(
                self._payloads, frozenset(self._offered), frozenset(self._revoked)
            )
            self._payloads, self._offered, self._revoked = {}, set(), set()
        return report

    def offer(self, request_id: str) -> None:
        """Prefill holds the prompt computed, and says so."""
        self._offered.add(request_id)

    def revoke(self, request_id: str, now: int) -> None:
        """Prefill gives the reservation up: it had not begun."""
        expected = self._expected.pop(request_id)
        self._revoked.add(request_id)
        self._do(
            self._ledger.released(Released(request_id, expected.token, "revoked", 1), WRITER, 1, now), now
        )

    def _let_peer_act(self, request_id: str, expected: _Expected, now: int) -> None:
        outcome, is_due = expected.push.outcome, expected.due <= now
        if expected.released is not None and expected.released <= now:
            self._stop_writing(request_id, expected, now)
        elif is_due and outcome == "complete":
            self._write(expected, whole=True)
            del self._expected[request_id]
            notice = Completed(request_id, expected.token, 1, _payload(expected))
            self._do(self._ledger.completed(notice, WRITER, 1, now), now)
        elif is_due and outcome == "fail":
            self._stop_writing(request_id, expected, now)
        elif is_due and outcome == "fail_early" and expected.released is None:
            expected.released = now + expected.push.ack_delay
            self._do(self._ledger.failing(Failing(request_id, expected.token, "push_failed")), now)

    def _stop_writing(self, request_id: str, expected: _Expected, now: int) -> None:
        self._write(expected, whole=False)
        del self._expected[request_id]
        notice = Released(request_id, expected.token, "push_failed", 1)
        self._do(self._ledger.released(notice, WRITER, 1, now), now)

    def _write(self, expected: _Expected, *, whole: bool) -> None:
        """The registered blocks are the last ones of the request; those before them were cached here."""
        first = cdiv(expected.num_tokens, BLOCK_SIZE) - len(expected.block_ids)
        for index, block_id in enumerate(expected.block_ids):
            start = (first + index) * BLOCK_SIZE
            for offset in range(BLOCK_SIZE):
                known = start + offset < expected.num_tokens and (whole or index % 2 == 0)
                self._memory[block_id][offset] = expected.conversation.kv(start + offset) if known else WRONG

    def _do(self, actions: list[Any], now: int) -> None:
        for action in actions:
            match action:
                case SendCancel(request_id=request_id, registered=True):
                    expected = self._expected.get(request_id)
                    if expected is not None and expected.released is None:
                        expected.released = now + expected.push.ack_delay
                case Fail(request_id=request_id):
                    if self._shape.reports_ids:
                        self._report.failed_recving.add(request_id)
                    self._report.invalid_block_ids.update(self._block_ids[request_id])
                case Done(request_id=request_id, payload=payload):
                    del self._block_ids[request_id]
                    if payload:
                        self._payloads[request_id] = payload
                    self._report.finished_recving.add(request_id)


def _payload(expected: _Expected) -> bytes:
    """The token after those that prefill computed, and its drafts; read only where it was promised."""
    index = expected.num_tokens - len(expected.conversation.prompt)
    return codec.encode(expected.conversation.token(index), expected.conversation.drafts(index + 1))
