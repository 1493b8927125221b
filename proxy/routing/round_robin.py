"""Routing policy: one rank after the other."""

from collections.abc import Sequence

from proxy.routing.asked import Asked
from proxy.routing.load import RankKey, RankLoad

_BEFORE_ALL: RankKey = ("", -1)


class RoundRobin:
    """Whatever their load is; ranks that come and go do not disturb the order of the others."""

    reads_prefixes = False

    def __init__(self) -> None:
        self._last_prefill = self._last_decode = _BEFORE_ALL

    def prefill(self, ranks: Sequence[RankLoad], asked: Asked) -> RankLoad:
        chosen = _after(self._last_prefill, ranks)
        self._last_prefill = chosen.key
        return chosen

    def decode(self, ranks: Sequence[RankLoad], live: Sequence[RankLoad], asked: Asked) -> RankLoad:
        chosen = _after(self._last_decode, ranks)
        self._last_decode = chosen.key
        return chosen


def _after(last: RankKey, ranks: Sequence[RankLoad]) -> RankLoad:
    """The next one in the order of keys; after the last comes the first."""
    return min(ranks, key=lambda load: (load.key <= last, load.key))
