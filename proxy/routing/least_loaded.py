"""Routing policy: prefill by the fewest outstanding tokens, decode by the fewest requests."""

from collections.abc import Sequence

from proxy.routing.asked import Asked
from proxy.routing.load import RankLoad


class LeastLoaded:
    """Of equals the one that was not used for longest."""

    reads_prefixes = False

    def prefill(self, ranks: Sequence[RankLoad], asked: Asked) -> RankLoad:
        return min(ranks, key=lambda load: (load.outstanding_tokens, load.last_use))

    def decode(self, ranks: Sequence[RankLoad], live: Sequence[RankLoad], asked: Asked) -> RankLoad:
        return min(ranks, key=lambda load: (load.requests, load.last_use))
