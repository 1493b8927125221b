"""Picks the ranks of an attempt: what is known of each rank, and one module for each policy."""

from proxy.routing.asked import Asked
from proxy.routing.load import RankKey, RankLoad
from proxy.routing.ranks import Ranks, decode_ranks, default_window_tokens, held_limit_tokens

__all__ = [
    "Asked",
    "RankKey",
    "RankLoad",
    "Ranks",
    "decode_ranks",
    "default_window_tokens",
    "held_limit_tokens",
]
