"""What a prefill worker knows of every push: a state machine without clocks, threads or I/O.

A request id is in at most one of these states; the ids match exactly, never by prefix.

    finished     the prompt is computed, its blocks are held, decode has not registered
    pending      decode registered, the prompt is not computed
    pushing      matched: a write is about to be posted or in flight
    tombstone    nothing is or will be written; kept for a while to answer what still arrives

Every way out answers decode exactly when decode may hold blocks for the request.
"""

import hmac
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from kv_transfer.notices import Cancel, DecodePeer, Registration

_MAX_REGISTRATIONS_PER_REQUEST = 4


@dataclass(frozen=True, slots=True)
class Push:
    """Write these blocks (vLLM's BlockIds: one list per KV cache group) to the registered ones."""

    request_id: str
    block_ids: Any
    registration: Registration


@dataclass(frozen=True, slots=True)
class Release:
    """Give the request's blocks on prefill back: nothing was or will be pushed."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reply:
    """Tell a decode rank that nothing (more) will be written to what it registered."""

    request_id: str
    peer: DecodePeer
    token: str
    reason: str


Action = Push | Release | Reply


@dataclass(frozen=True, slots=True)
class _Finished:
    block_ids: Any
    token: str


@dataclass(frozen=True, slots=True)
class _Tombstone:
    reason: str
    token: str | None  # None: whoever asks
    expires_at: float


def _same(left: str, right: str) -> bool:
    return hmac.compare_digest(left.encode(), right.encode())


class PrefillLedger:
    """Not thread-safe; the caller holds a lock. Times are seconds on one monotonic clock."""

    def __init__(self, tombstone_ttl_s: float, tombstone_limit: int) -> None:
        self._tombstone_ttl_s = tombstone_ttl_s
        self._tombstone_limit = tombstone_limit
        self._finished: dict[str, _Finished] = {}
        self._pending: dict[str, list[Registration]] = {}
        self._pushing: dict[str, Registration] = {}
        self._tombstones: OrderedDict[str, _Tombstone] = OrderedDict()

    @property
    def outstanding(self) -> bool:
        """Whether somebody waits for something that arrives as a notification."""
        return bool(self._finished or self._pending or self._pushing)

    def is_pushing(self, request_id: str) -> bool:
        return request_id in self._pushing

    def finished(self, request_id: str, block_ids: Any, token: str, now: float) -> list[Action]:
        """The prompt is computed; its blocks are held until `Push` is done or `Release`."""
        tombstone = self._tombstones.get(request_id)
        if tombstone is not None and (tombstone.token is None or _same(tombstone.token, token)):
            return [Release(request_id, tombstone.reason)]
        actions: list[Action] = []
        chosen: Registration | None = None
        for registration in self._pending.pop(request_id, []):
            if chosen is None and _same(registration.token, token):
                chosen = registration
            else:
                actions.append(_refuse(registration, "token_mismatch"))
        self._finished[request_id] = _Finished(block_ids, token)
        if chosen is not None:
            actions += self._match(chosen, now)
        return actions

    def ended(self, request_id: str, reason: str, now: float) -> list[Action]:
        """The request ended without blocks to push (aborted, failed)."""
        self._bury(request_id, reason, None, now)
        return [_refuse(registration, reason) for registration in self._pending.pop(request_id, [])]

    def abandoned(self, request_id: str, reason: str, now: float) -> list[Action]:
        """Prefill gives up blocks that it held for a finished request; one in flight runs to its end."""
        if self._finished.pop(request_id, None) is None:
            return []
        self._bury(request_id, reason, None, now)
        return [Release(request_id, reason)]

    def registered(self, registration: Registration, now: float) -> list[Action]:
        request_id = registration.request_id
        if (pushing := self._pushing.get(request_id)) is not None:
            # A repeat of the matched one is answered by the write; "released" would unfence its blocks.
            return (
                [] if _same(pushing.token, registration.token) else [_refuse(registration, "token_mismatch")]
            )
        if request_id in self._finished:
            return self._match(registration, now)
        tombstone = self._tombstones.get(request_id)
        if tombstone is not None and (tombstone.token is None or _same(tombstone.token, registration.token)):
            return [_refuse(registration, tombstone.reason)]
        waiting = self._pending.setdefault(request_id, [])
        if len(waiting) >= _MAX_REGISTRATIONS_PER_REQUEST:
            return [_refuse(registration, "too_many_registrations")]
        waiting.append(registration)
        return []

    def cancelled(self, cancel: Cancel, now: float) -> list[Action]:
        """Decode does not want it any more. Idempotent; a push in flight is answered by its completion."""
        request_id = cancel.request_id
        pushing = self._pushing.get(request_id)
        if pushing is not None and _same(pushing.token, cancel.token):
            return []
        answer: list[Action] = []
        if cancel.registered:
            answer.append(Reply(request_id, cancel.peer, cancel.token, cancel.reason))
        if pushing is not None:
            return answer
        if (finished := self._finished.get(request_id)) is not None:
            if not _same(finished.token, cancel.token):
                return answer
            del self._finished[request_id]
            self._bury(request_id, cancel.reason, cancel.token, now)
            return [Release(request_id, cancel.reason), *answer]
        left = [reg for reg in self._pending.pop(request_id, []) if not _same(reg.token, cancel.token)]
        if left:
            self._pending[request_id] = left
        if request_id not in self._tombstones:
            self._bury(request_id, cancel.reason, cancel.token, now)
        return answer

    def pushed(self, request_id: str, now: float) -> Registration | None:
        """Every write of the request is done; its completion notice went with it."""
        registration = self._pushing.pop(request_id, None)
        if registration is not None:
            self._bury(request_id, "pushed", None, now)
        return registration

    def push_failed(self, request_id: str, reason: str, now: float) -> list[Action]:
        """No write of the request is in flight any more and at least one failed."""
        registration = self._pushing.pop(request_id, None)
        if registration is None:
            return []
        self._bury(request_id, reason, None, now)
        return [Release(request_id, reason), _refuse(registration, reason)]

    def lease_expired(self, request_id: str, now: float) -> None:
        """vLLM gave the blocks back (or will have, for any other reason): nothing may be pushed from them."""
        if self._finished.pop(request_id, None) is not None:
            self._bury(request_id, "lease_expired", None, now)

    def tick(self, now: float) -> list[Action]:
        """Drop registrations past their deadline and old tombstones."""
        actions: list[Action] = []
        for request_id, waiting in list(self._pending.items()):
            late = [registration for registration in waiting if registration.deadline <= now]
            if not late:
                continue
            actions += [_refuse(registration, "deadline") for registration in late]
            left = [registration for registration in waiting if registration.deadline > now]
            if left:
                self._pending[request_id] = left
            else:
                del self._pending[request_id]
                self._bury(request_id, "deadline", late[0].token, now)
        while self._tombstones and next(iter(self._tombstones.values())).expires_at <= now:
            self._tombstones.popitem(last=False)
        return actions

    def _match(self, registration: Registration, now: float) -> list[Action]:
        request_id = registration.request_id
        finished = self._finished[request_id]
        if not _same(finished.token, registration.token):
            return [_refuse(registration, "token_mismatch")]
        del self._finished[request_id]
        if registration.deadline <= now:
            self._bury(request_id, "deadline", None, now)
            return [Release(request_id, "deadline"), _refuse(registration, "deadline")]
        self._pushing[request_id] = registration
        return [Push(request_id, finished.block_ids, registration)]

    def _bury(self, request_id: str, reason: str, token: str | None, now: float) -> None:
        self._tombstones.pop(request_id, None)
        self._tombstones[request_id] = _Tombstone(reason, token, now + self._tombstone_ttl_s)
        while len(self._tombstones) > self._tombstone_limit:
            self._tombstones.popitem(last=False)


def _refuse(registration: Registration, reason: str) -> Reply:
    return Reply(registration.request_id, registration.peer, registration.token, reason)
