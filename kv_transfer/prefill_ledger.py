"""What a prefill worker knows of every push: a state machine without clocks, threads or I/O.

A request id is in at most one of these states; the ids match exactly, never by prefix.

    pending      decode registered, prefill has computed nothing yet
    push         prefill has computed blocks; decode may have registered (then they are written) or not yet
    tombstone    nothing is or will be written; kept for a while to answer what still arrives

Every way out answers decode exactly when decode may hold blocks for the request, and never before its last
write has ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.notices import Ask, Cancel, DecodePeer, Registration
from kv_transfer.push_plan import BlockIds, Chunk, GroupLayout, PushPlan, Span
from kv_transfer.tombstones import Tombstones, same_token

PUSHED = "pushed"
"""The reason of a `Release` that follows a whole push."""
REVOKED = "revoked"
"""The reason of a `Reply` to a decode rank that needs the blocks for another request."""

_MAX_REGISTRATIONS_PER_REQUEST = 4


@dataclass(frozen=True, slots=True)
class Write:
    """Write these blocks to the registered ones; ask `starting` first, and report `settled`.

    `streamed`: the prompt is still being computed.
    """

    request_id: str
    number: int
    local_block_ids: BlockIds
    remote_block_ids: BlockIds
    registration: Registration
    streamed: bool


@dataclass(frozen=True, slots=True)
class Complete:
    """Tell decode that every write is done.

    `tail_s`: seconds since the prompt was computed and decode had registered. `payload`: what is handed over
    besides the KV.
    """

    request_id: str
    registration: Registration
    num_bytes: int
    tail_s: float
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class Release:
    """The blocks that vLLM holds for the finished request are free to go."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reply:
    """Tell a decode rank that nothing (more) will be written to what it registered."""

    request_id: str
    peer: DecodePeer
    token: str
    reason: str


@dataclass(frozen=True, slots=True)
class Warn:
    """Tell a decode rank that its KV will not come, while writes to its blocks may be in flight."""

    request_id: str
    peer: DecodePeer
    token: str
    reason: str


@dataclass(frozen=True, slots=True)
class Offer:
    """Tell a decode rank that asked that the prompt is computed and waits for its registration."""

    request_id: str
    peer: DecodePeer
    token: str


Action = Write | Complete | Release | Reply | Warn | Offer


class PrefillLedger:
    """Not thread-safe; the caller holds a lock. Times are seconds on one monotonic clock."""

    def __init__(self, layout: Sequence[GroupLayout], tombstone_ttl_s: float, tombstone_limit: int) -> None:
        self._layout = tuple(layout)
        self._tombstones = Tombstones(tombstone_ttl_s, tombstone_limit)
        self._pending: dict[str, list[Registration]] = {}
        self._pushes: dict[str, PushPlan] = {}
        self._last_number = 0

    @property
    def outstanding(self) -> bool:
        """Whether somebody waits for something that arrives as a notification."""
        return bool(self._pending or self._pushes)

    def is_pushing(self, request_id: str) -> bool:
        """Whether decode has registered, so that blocks of the request are or will be written."""
        push = self._pushes.get(request_id)
        return push is not None and push.registration is not None

    def foreseen(self, request_id: str, token: str, chunk: Chunk) -> tuple[Span, Registration] | None:
        """What `computed` will have written of a chunk, as things are now. Changes nothing."""
        push = self._pushes.get(request_id) or PushPlan(token, self._layout)
        registered = (
            [push.registration] if push.registration is not None else self._pending.get(request_id, [])
        )
        for registration in registered:
            if same_token(registration.token, token):
                span = push.foreseen(chunk, registration)
                return None if span is None else (span, registration)
        return None

    def computed(self, request_id: str, token: str, chunk: Chunk, now: float) -> list[Action]:
        """A step completed blocks of a running request; they stay valid until it ends or is preempted."""
        if request_id not in self._pushes and self._tombstones.reason(request_id, token) is not None:
            return []
        push, actions = self._push(request_id, token)
        push.extend(chunk)
        return actions + self._advance(request_id, push, now)

    def sampled(self, request_id: str, token: str, payload: bytes, now: float) -> list[Action]:
        """What goes with the notice of completion; say it before the blocks that complete the prompt."""
        if request_id not in self._pushes and self._tombstones.reason(request_id, token) is not None:
            return []
        push, actions = self._push(request_id, token)
        push.payload = payload
        return actions

    def preempted(self, request_id: str) -> None:
        """The request lost its blocks and will be computed anew."""
        if (push := self._pushes.get(request_id)) is not None:
            push.restart()
            push.payload = b""

    def finished(self, request_id: str, block_ids: BlockIds, token: str, now: float) -> list[Action]:
        """The prompt is computed; vLLM holds all of its blocks until `Release`."""
        if request_id not in self._pushes:
            reason = self._tombstones.reason(request_id, token)
            if reason is not None:
                return [Release(request_id, reason)]
        push, actions = self._push(request_id, token)
        push.held = True
        push.finish(block_ids)
        return actions + self._advance(request_id, push, now)

    def ended(self, request_id: str, reason: str, now: float) -> list[Action]:
        """The request ended without blocks to push (aborted, failed); vLLM has freed them."""
        if (push := self._pushes.get(request_id)) is not None:
            return self._fail(request_id, push, reason, now)
        if self._tombstones.reason(request_id, "") != PUSHED:
            self._tombstones.bury(request_id, reason, None, now)
        return [_refuse(registration, reason) for registration in self._pending.pop(request_id, [])]

    def abandoned(self, request_id: str, reason: str, now: float) -> list[Action]:
        """Prefill gives up blocks that it held for a finished request; a push under way runs to its end."""
        push = self._pushes.get(request_id)
        if push is None or not push.held or push.registration is not None:
            return []
        return self._fail(request_id, push, reason, now)

    def registered(self, registration: Registration, now: float) -> list[Action]:
        request_id, token = registration.request_id, registration.token
        if (push := self._pushes.get(request_id)) is not None:
            if not same_token((push.registration or push).token, token):
                return [_refuse(registration, "token_mismatch")]
            if push.registration is not None:
                return []  # a repeat: "released" would unfence the blocks that are being written
            push.registration = registration
            return self._advance(request_id, push, now)
        if (reason := self._tombstones.reason(request_id, token)) is not None:
            return [_refuse(registration, reason)]
        waiting = self._pending.setdefault(request_id, [])
        if any(same_token(other.token, token) for other in waiting):
            return []  # a repeat too: its blocks will be written
        if len(waiting) >= _MAX_REGISTRATIONS_PER_REQUEST:
            return [_refuse(registration, "too_many_registrations")]
        waiting.append(registration)
        return []

    def cancelled(self, cancel: Cancel, now: float) -> list[Action]:
        """Decode does not want it any more. Idempotent; writes in flight are awaited before the answer."""
        request_id = cancel.request_id
        answer: list[Action] = []
        if cancel.registered:
            answer.append(Reply(request_id, cancel.peer, cancel.token, cancel.reason))
        if (push := self._pushes.get(request_id)) is not None:
            if not same_token(push.token, cancel.token):
                return answer
            if push.registration is not None:
                answer = []  # given when the last write has ended
            return self._fail(request_id, push, cancel.reason, now, warn=False) + answer
        self._withdraw(request_id, cancel.token)
        if request_id not in self._tombstones:
            self._tombstones.bury(request_id, cancel.reason, cancel.token, now)
        return answer

    def asked(self, ask: Ask, now: float) -> list[Action]:
        """Decode stands still for want of blocks. Give those up that nothing is computed for."""
        request_id, push = ask.request_id, self._pushes.get(ask.request_id)
        if not ask.registered:
            if push is None or not push.held or push.registration is not None:
                return []
            return [Offer(request_id, ask.peer, ask.token)] if same_token(push.token, ask.token) else []
        if push is not None:
            return []
        unused = self._withdraw(request_id, ask.token)
        if unused and request_id not in self._pending:
            self._tombstones.bury(request_id, REVOKED, ask.token, now)
        return [_refuse(registration, REVOKED) for registration in unused]

    def starting(self, write: Write, now: float) -> tuple[bool, list[Action]]:
        """Ask right before the write is handed to NIXL whether it still may be."""
        push = self._pushes.get(write.request_id)
        if push is None or not push.wants(write.number):
            return False, []
        if write.registration.deadline <= now:
            return False, self._fail(write.request_id, push, "deadline", now, warn=False)
        push.started(write.number)
        return True, []

    def settled(self, write: Write, num_bytes: int, failure: str | None, now: float) -> list[Action]:
        """The write is not in flight: done, or failed for a reason, or it could not be started."""
        push = self._pushes.get(write.request_id)
        if push is None:
            return []
        push.num_bytes += num_bytes
        if push.settled(write.number) and failure is not None:
            return self._fail(write.request_id, push, failure, now)
        return self._advance(write.request_id, push, now)

    def lease_expired(self, request_id: str, now: float) -> None:
        """vLLM gave the blocks back (or will have, for any other reason): nothing may be pushed from them."""
        push = self._pushes.get(request_id)
        if push is not None and push.registration is None:
            del self._pushes[request_id]
            self._tombstones.bury(request_id, "lease_expired", None, now)

    def tick(self, now: float) -> list[Action]:
        """Give up what is past decode's deadline; drop old tombstones."""
        actions: list[Action] = []
        for request_id, push in list(self._pushes.items()):
            late = push.registration is not None and push.registration.deadline <= now
            if late and push.failure is None:
                actions += self._fail(request_id, push, "deadline", now, warn=False)
        for request_id, waiting in list(self._pending.items()):
            expired = [registration for registration in waiting if registration.deadline <= now]
            if not expired:
                continue
            actions += [_refuse(registration, "deadline") for registration in expired]
            left = [registration for registration in waiting if registration.deadline > now]
            if left:
                self._pending[request_id] = left
            else:
                del self._pending[request_id]
                self._tombstones.bury(request_id, "deadline", expired[0].token, now)
        self._tombstones.expire(now)
        return actions

    def _withdraw(self, request_id: str, token: str) -> list[Registration]:
        """Forget what an attempt registered and nothing was computed for, and return it."""
        pending = self._pending.pop(request_id, [])
        left = [registration for registration in pending if not same_token(registration.token, token)]
        if left:
            self._pending[request_id] = left
        return [registration for registration in pending if registration not in left]

    def _push(self, request_id: str, token: str) -> tuple[PushPlan, list[Action]]:
        """The request's push; a new one takes the registration with its token and refuses the others."""
        if (known := self._pushes.get(request_id)) is not None:
            return known, []
        push = self._pushes[request_id] = PushPlan(token, self._layout)
        actions: list[Action] = []
        for registration in self._pending.pop(request_id, []):
            if push.registration is None and same_token(registration.token, token):
                push.registration = registration
            else:
                actions.append(_refuse(registration, "token_mismatch"))
        return push, actions

    def _advance(self, request_id: str, push: PushPlan, now: float) -> list[Action]:
        """Give out what can be written now; close the push if nothing is left."""
        registration = push.registration
        if push.failure is not None:
            return self._close_failed(request_id, push, now)
        if registration is None:
            return []
        if registration.deadline <= now:
            return self._fail(request_id, push, "deadline", now, warn=False)
        if push.mismatched:
            return self._fail(request_id, push, "block_mismatch", now)
        if push.complete and push.ready_at is None:
            push.ready_at = now
        actions: list[Action] = []
        while (span := push.take(self._last_number + 1)) is not None:
            self._last_number += 1
            streamed = not push.complete
            actions.append(
                Write(request_id, self._last_number, span.local, span.remote, registration, streamed)
            )
        if push.done:
            tail_s = now - push.ready_at if push.ready_at is not None else 0.0
            actions.append(Complete(request_id, registration, push.num_bytes, tail_s, push.payload))
            actions += self._close(request_id, push, PUSHED, now)
        return actions

    def _fail(
        self, request_id: str, push: PushPlan, reason: str, now: float, *, warn: bool = True
    ) -> list[Action]:
        """Start nothing more. Decode hears of it now if writes in flight hold the answer up."""
        first = push.failure is None
        push.failure = push.failure or reason
        push.drop_unstarted()
        actions: list[Action] = []
        if first and warn and push.busy and (registration := push.registration) is not None:
            actions.append(Warn(request_id, registration.peer, registration.token, reason))
        return actions + self._close_failed(request_id, push, now)

    def _close_failed(self, request_id: str, push: PushPlan, now: float) -> list[Action]:
        if push.busy or push.failure is None:
            return []
        actions = self._close(request_id, push, push.failure, now)
        if push.registration is not None:
            actions.append(_refuse(push.registration, push.failure))
        return actions

    def _close(self, request_id: str, push: PushPlan, reason: str, now: float) -> list[Action]:
        del self._pushes[request_id]
        self._tombstones.bury(request_id, reason, None, now)
        return [Release(request_id, reason)] if push.held else []


def _refuse(registration: Registration, reason: str) -> Reply:
    return Reply(registration.request_id, registration.peer, registration.token, reason)
