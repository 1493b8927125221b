"""Requests of one session go to one rank as long as it can be chosen: rendezvous hashing."""

import hashlib
from collections.abc import Sequence

from proxy.routing.load import RankLoad


def chosen_by(session: str, ranks: Sequence[RankLoad]) -> RankLoad:
    """The rank with the highest hash of session and rank; there is at least one.

    Each proxy comes to the same one. A rank that goes takes only its own sessions to others, and one that
    comes takes its share from all.
    """
    return max(ranks, key=lambda load: (_weight(session, load), load.key))


def _weight(session: str, load: RankLoad) -> bytes:
    address, local_rank = load.key
    return hashlib.blake2b(f"{session}\0{address}\0{local_rank}".encode(), digest_size=8).digest()
