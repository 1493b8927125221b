"""What one more request does to the size of a decode group's steps."""

import bisect
from collections.abc import Sequence

from proxy.routing.load import RankLoad


def step_rows(load: RankLoad) -> int | None:
    """Requests that one step of the rank has room for: rows of 1 + K tokens; None if it does not say."""
    width = _width(load)
    budget = load.node.description.engine.max_num_scheduled_tokens or load.rank.max_num_batched_tokens
    return min(load.rank.max_num_seqs, budget // width) or None


def padded_tokens(load: RankLoad, rows: int) -> int:
    """Tokens of the full graph that a step with so many rows runs in; beyond the largest they are as many."""
    sizes = load.node.description.engine.full_graph_tokens
    tokens = rows * _width(load)
    index = bisect.bisect_left(sizes, tokens)
    return sizes[index] if index < len(sizes) else tokens


def growth_tokens(load: RankLoad, live: Sequence[RankLoad]) -> int:
    """By how much one more request on the rank makes the steps of its whole group larger.

    All ranks of a group run the graph that the fullest of them needs. 0 without graphs of known sizes.
    """
    if not load.node.description.engine.full_graph_tokens:
        return 0
    group = [peer for peer in live if peer.node.group_id == load.node.group_id]
    now = max((padded_tokens(peer, _rows(peer)) for peer in group), default=0)
    return max(0, padded_tokens(load, _rows(load, more=1)) - now)


def _rows(load: RankLoad, more: int = 0) -> int:
    most = step_rows(load)
    return load.requests + more if most is None else min(load.requests + more, most)


def _width(load: RankLoad) -> int:
    return 1 + load.node.key.num_speculative_tokens
