"""Decides when so much of a rank's KV pool is in quarantine that the node has to start anew.

Blocks that a peer could still write to come back with its answer or its proven end (docs/architecture.md,
"Fencing"). A peer that is neither heard of nor gone would keep them for good; a new process, with a new
engine id, has all of its memory back, since nothing that was meant for the old one reaches it.
"""

import logging
from collections.abc import Sequence

logger = logging.getLogger(__name__)

PATIENCE_S = 15.0
"""For this long without a break. The cancels are repeated and the peers looked at each 5 s, so that the
blocks of a peer that has died are back by then."""


class QuarantineWatch:
    """Of one node. Times are seconds on one monotonic clock."""

    def __init__(self, limit_ratio: float, patience_s: float = PATIENCE_S) -> None:
        self._limit_ratio = limit_ratio
        self._patience_s = patience_s
        self._pools: Sequence[int] = ()
        self._since: dict[int, float] = {}

    def set_pools(self, num_kv_blocks: Sequence[int]) -> None:
        """The size of each local rank's pool."""
        self._pools = num_kv_blocks

    def exceeded(self, quarantined_blocks: Sequence[int], now: float) -> str:
        """Of each local rank; returns why the node should start anew, or "" while it need not."""
        for rank, (blocks, pool) in enumerate(zip(quarantined_blocks, self._pools, strict=False)):
            if blocks <= self._limit_ratio * pool:
                self._since.pop(rank, None)
                continue
            if rank not in self._since:
                logger.warning("rank %d has %d of %d KV blocks in quarantine", rank, blocks, pool)
            if now - self._since.setdefault(rank, now) >= self._patience_s:
                return f"rank {rank} has {blocks} of {pool} KV blocks in quarantine and none comes back"
        return ""
