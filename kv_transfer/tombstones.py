"""Requests that prefill is done with, kept for a while so that what still arrives for them gets an answer."""

import hmac
from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Tombstone:
    reason: str
    token: str | None  # None: whoever asks
    expires_at: float


def same_token(left: str, right: str) -> bool:
    return hmac.compare_digest(left.encode(), right.encode())


class Tombstones:
    """Bounded in time and number; the oldest goes first. Times are seconds on one monotonic clock."""

    def __init__(self, ttl_s: float, limit: int) -> None:
        self._ttl_s = ttl_s
        self._limit = limit
        self._by_request: OrderedDict[str, _Tombstone] = OrderedDict()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    def bury(self, request_id: str, reason: str, token: str | None, now: float) -> None:
        """From now on `request_id` is over; with a token, for those that name it."""
        self._by_request.pop(request_id, None)
        self._by_request[request_id] = _Tombstone(reason, token, now + self._ttl_s)
        while len(self._by_request) > self._limit:
            self._by_request.popitem(last=False)

    def reason(self, request_id: str, token: str) -> str | None:
        """Why the request is over for whoever has this token; None if it is not."""
        tombstone = self._by_request.get(request_id)
        if tombstone is None or (tombstone.token is not None and not same_token(tombstone.token, token)):
            return None
        return tombstone.reason

    def expire(self, now: float) -> None:
        while self._by_request and next(iter(self._by_request.values())).expires_at <= now:
            self._by_request.popitem(last=False)
