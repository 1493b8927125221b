"""Decode: notices that its KV pool may wait for prefill's and prefill's for it, and whom to ask then.

Blocks are reserved here for requests whose prompt is not computed yet. If none of those can be computed,
since prefill's pool is full of prompts that wait for blocks here, nothing moves on either side. No rank sees
both pools, so a rank that stands still asks: prefill gives a reservation up that it has written nothing to,
and says which prompts it holds finished. Pure: no clocks, threads or I/O.
"""

from dataclasses import dataclass
from typing import Any

from kv_transfer.params import TOKEN_KEY, PrefillPeer

MAX_QUESTIONS = 64
"""Asked at once; the oldest requests are."""


@dataclass(frozen=True, slots=True)
class Question:
    """Ask prefill how it stands with one request; `allocated`: blocks here are reserved for it."""

    request_id: str
    peer: PrefillPeer
    token: str
    allocated: bool


class StallWatch:
    """One rank's. Times are seconds on one monotonic clock."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._waiting: dict[str, tuple[PrefillPeer, str]] = {}  # in the order in which they came
        self._allocated: set[str] = set()
        self._blocked = False
        self._since: float | None = None

    def arrived(self, request_id: str, params: dict[str, Any]) -> None:
        """A request whose KV comes from prefill; it waits until `ended`."""
        self._waiting[request_id] = (peer_of(params), params.get(TOKEN_KEY, ""))

    def considered(self, request_id: str) -> None:
        """The scheduler looks for blocks for it; unless `allocated` follows, there were none."""
        self._blocked = request_id in self._waiting and request_id not in self._allocated

    def allocated(self, request_id: str) -> None:
        """Its blocks are reserved until its KV arrives."""
        if request_id in self._waiting:
            self._allocated.add(request_id)
        self._blocked = False

    def ended(self, request_id: str) -> None:
        """Its KV is here, or it is over."""
        self._waiting.pop(request_id, None)
        self._allocated.discard(request_id)

    def is_waiting(self, request_id: str) -> bool:
        """Whether it has no blocks yet."""
        return request_id in self._waiting and request_id not in self._allocated

    def step(self, *, idle: bool, now: float) -> list[Question]:
        """Once an engine step; `idle`: no row was scheduled. What to ask now, mostly nothing."""
        blocked, self._blocked = self._blocked, False
        if not (blocked and idle and self._allocated):
            self._since = None
            return []
        if self._since is None:
            self._since = now
        if now - self._since < self._patience_s:
            return []
        self._since = now
        return [
            Question(request_id, peer, token, request_id in self._allocated)
            for request_id, (peer, token) in list(self._waiting.items())[:MAX_QUESTIONS]
        ]


def peer_of(params: dict[str, Any]) -> PrefillPeer:
    """The prefill rank of a decode leg's `kv_transfer_params`."""
    return PrefillPeer(
        engine_id=params["remote_engine_id"],
        side_channel_host=params["remote_host"],
        side_channel_port=params["remote_port"],
        tp_size=params["tp_size"],
    )
