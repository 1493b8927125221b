"""What a decode worker knows of every receive: a state machine without clocks, threads or I/O.

The fence: once a registration was handed to NIXL, prefill may write into the blocks at any time, so they
are given back (`Done`) only after its `Completed` or its `Released`. A request may fail (`Fail`) long before
that; its blocks then stay with vLLM's finished request, out of use.
"""

import hmac
from dataclasses import dataclass, field

from kv_transfer.notices import Completed, Failing, Released
from kv_transfer.params import PrefillPeer


@dataclass(frozen=True, slots=True)
class SendCancel:
    """Tell prefill that decode does not want the KV of this request.

    `repeated`: prefill has not answered the last one in time.
    """

    request_id: str
    peer: PrefillPeer
    token: str
    reason: str
    registered: bool
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """Fail the request to its client; its blocks stay out of use until `Done`."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """The blocks are decode's own again: holding the KV if `received`, else to be given back.

    `payload` came with the KV. `seconds` since the registration was sent.
    """

    request_id: str
    received: bool
    payload: bytes = b""
    seconds: float = 0.0


Action = SendCancel | Fail | Done


@dataclass(slots=True)
class _Receive:
    peer: PrefillPeer
    token: str
    num_blocks: int
    deadline: float
    sent_at: float | None = None
    payload: bytes = b""
    failure: str | None = None
    told: bool = False  # `Fail` was given out
    writers_done: set[str] = field(default_factory=set)
    cancelled_at: float | None = None
    next_cancel_at: float = 0.0


class DecodeLedger:
    """Not thread-safe; the caller holds a lock. Times are seconds on one monotonic clock."""

    def __init__(self, registration_deadline_s: float, cancel_ack_timeout_s: float) -> None:
        self._registration_deadline_s = registration_deadline_s
        self._cancel_ack_timeout_s = cancel_ack_timeout_s
        self._receives: dict[str, _Receive] = {}

    @property
    def outstanding(self) -> bool:
        return bool(self._receives)

    def quarantined(self, now: float) -> tuple[int, int]:
        """(requests, blocks) whose cancel prefill has not answered in time."""
        late = [
            receive
            for receive in self._receives.values()
            if receive.cancelled_at is not None and now - receive.cancelled_at > self._cancel_ack_timeout_s
        ]
        return len(late), sum(receive.num_blocks for receive in late)

    def expects(self, request_id: str) -> bool:
        return request_id in self._receives

    def may_be_revoked(self, request_id: str) -> bool:
        """Whether prefill has the registration and nothing has ended the receive."""
        receive = self._receives.get(request_id)
        return receive is not None and receive.sent_at is not None and receive.failure is None

    def opened(self, request_id: str, peer: PrefillPeer, token: str, num_blocks: int, now: float) -> None:
        """The scheduler allocated blocks and wants them registered."""
        deadline = now + self._registration_deadline_s
        self._receives[request_id] = _Receive(peer, token, num_blocks, deadline)

    def sending(self, request_id: str, now: float) -> float | None:
        """Ask right before the registration is sent: seconds left for it, or None if it must not be."""
        receive = self._receives.get(request_id)
        if receive is None or receive.failure is not None or receive.deadline <= now:
            return None
        receive.sent_at = now
        return receive.deadline - now

    def unreachable(self, request_id: str, reason: str) -> list[Action]:
        """Prefill could not be reached, and no registration was handed to NIXL."""
        receive = self._receives.get(request_id)
        if receive is None or receive.sent_at is not None:
            return []
        return self._fail(request_id, receive, reason) + self._close(request_id)

    def send_failed(self, request_id: str, reason: str, now: float) -> list[Action]:
        """NIXL refused a registration. It may have got through all the same: the blocks stay fenced."""
        receive = self._receives.get(request_id)
        return [] if receive is None else self._give_up(request_id, receive, reason, now)

    def completed(self, notice: Completed, writer: str, num_writers: int, now: float) -> list[Action]:
        """The writes of one prefill worker (its NIXL agent's name) of `num_writers` are all done."""
        receive = self._receive(notice.request_id, notice.token)
        if receive is None:
            return []
        actions: list[Action] = []
        if notice.payload and receive.payload not in (b"", notice.payload):
            actions = self._fail(notice.request_id, receive, "hand_off_mismatch")
        receive.payload = notice.payload or receive.payload
        return actions + self._count(notice.request_id, receive, writer, num_writers, now)

    def failing(self, notice: Failing) -> list[Action]:
        """Prefill gives up, but may still be writing: only `released` gives the blocks back."""
        receive = self._receive(notice.request_id, notice.token)
        return [] if receive is None else self._fail(notice.request_id, receive, notice.reason)

    def released(self, notice: Released, writer: str, num_writers: int, now: float) -> list[Action]:
        """One prefill worker of `num_writers` says that it writes no more."""
        receive = self._receive(notice.request_id, notice.token)
        if receive is None:
            return []
        actions = self._fail(notice.request_id, receive, notice.reason)
        return actions + self._count(notice.request_id, receive, writer, num_writers, now)

    def aborted(self, request_id: str, reason: str, now: float) -> list[Action]:
        """The scheduler finished the request while it waited for the KV."""
        receive = self._receives.get(request_id)
        if receive is None or receive.cancelled_at is not None:
            return []
        receive.told = True  # by the scheduler
        return self._give_up(request_id, receive, reason, now)

    def tick(self, now: float) -> list[Action]:
        """Fail what is past its deadline; repeat cancels that prefill has not answered."""
        actions: list[Action] = []
        for request_id, receive in list(self._receives.items()):
            if receive.cancelled_at is None:
                if receive.deadline <= now:
                    actions += self._give_up(request_id, receive, "deadline", now)
            elif receive.next_cancel_at <= now:
                receive.next_cancel_at = now + self._cancel_ack_timeout_s
                actions.append(self._cancel(request_id, receive, repeated=True))
        return actions

    def proven_dead(self, request_id: str) -> list[Action]:
        """The process that could write is gone, so nothing can be written any more."""
        receive = self._receives.get(request_id)
        if receive is None:
            return []
        return self._fail(request_id, receive, "prefill_dead") + self._close(request_id)

    def _give_up(self, request_id: str, receive: _Receive, reason: str, now: float) -> list[Action]:
        actions = self._fail(request_id, receive, reason)
        if receive.cancelled_at is None:
            receive.cancelled_at = now
            receive.next_cancel_at = now + self._cancel_ack_timeout_s
            actions.append(self._cancel(request_id, receive))
        if receive.sent_at is None:
            actions += self._close(request_id)
        return actions

    def _cancel(self, request_id: str, receive: _Receive, *, repeated: bool = False) -> SendCancel:
        reason, sent = receive.failure or "cancelled", receive.sent_at is not None
        return SendCancel(request_id, receive.peer, receive.token, reason, sent, repeated)

    def _fail(self, request_id: str, receive: _Receive, reason: str) -> list[Action]:
        receive.failure = receive.failure or reason
        if receive.told:
            return []
        receive.told = True
        return [Fail(request_id, reason)]

    def _count(
        self, request_id: str, receive: _Receive, writer: str, num_writers: int, now: float
    ) -> list[Action]:
        receive.writers_done.add(writer)
        if len(receive.writers_done) < num_writers:
            return []
        if receive.failure is not None:
            return self._close(request_id)
        # Prefill writes to every TP rank of decode once it has one registration, maybe not this rank's.
        seconds = now - receive.sent_at if receive.sent_at is not None else 0.0
        del self._receives[request_id]
        return [Done(request_id, True, receive.payload, seconds)]

    def _receive(self, request_id: str, token: str) -> _Receive | None:
        receive = self._receives.get(request_id)
        known = receive is not None and hmac.compare_digest(receive.token.encode(), token.encode())
        return receive if known else None

    def _close(self, request_id: str) -> list[Action]:
        del self._receives[request_id]
        return [Done(request_id, received=False)]
