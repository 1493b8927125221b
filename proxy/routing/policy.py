"""The seam between what is known of the ranks and the choice of one."""

from collections.abc import Sequence
from typing import Protocol

from proxy.routing.asked import Asked
from proxy.routing.load import RankLoad


class RoutingPolicy(Protocol):
    """Chooses; what may be chosen from is decided before, alike for all policies (`Ranks`)."""

    reads_prefixes: bool
    """Whether it wants to know what prefix caches have: finding out costs a hash for each cached block."""

    def prefill(self, ranks: Sequence[RankLoad], asked: Asked) -> RankLoad:
        """One of `ranks`, all of which are below their window; there is at least one."""

    def decode(self, ranks: Sequence[RankLoad], live: Sequence[RankLoad], asked: Asked) -> RankLoad | None:
        """One of `ranks`, of which there is at least one; None to have the attempt wait in the proxy.

        `live` are all ranks that could be chosen from, those included on which the request has failed: the
        ranks of a group step together.
        """
