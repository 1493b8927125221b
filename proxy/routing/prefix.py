"""Routing policy: the prefill rank that has the longest part of the prompt, the least loaded decode rank."""

from collections.abc import Sequence

from proxy.routing.asked import Asked
from proxy.routing.least_loaded import LeastLoaded
from proxy.routing.load import RankLoad


class Prefix(LeastLoaded):
    """However much waits there, up to its window. Where no rank has any of it: by load."""

    reads_prefixes = True

    def prefill(self, ranks: Sequence[RankLoad], asked: Asked) -> RankLoad:
        longest = max(asked.cached_tokens(load) for load in ranks)
        return super().prefill([load for load in ranks if asked.cached_tokens(load) == longest], asked)
