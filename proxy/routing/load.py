"""One live rank and its load, as its node reports it and as this proxy knows it."""

import itertools
import math
from dataclasses import dataclass, field

from proxy.nodes import Node, Rank
from proxy.routing.cached_blocks import CachedBlocks
from proxy.routing.step_shape import StepShape

RankKey = tuple[str, int]
"""A rank over its node's restarts: address and local rank."""

_uses = itertools.count(1)


@dataclass(slots=True, eq=False)
class RankLoad:
    """Of one session: it begins anew when the node does."""

    node: Node
    rank: Rank
    window_tokens: int
    held_limit_tokens: int | None = None
    """Of a prefill rank: what finished prompts may hold of its pool until their KV is on decode."""
    outstanding_tokens: int = 0
    """Of prompts that were sent and are not computed, without what the rank had cached as far as known."""
    held_tokens: int = 0
    in_flight: int = 0
    of_others: int = 0
    """Requests running and waiting at the last report that were not ours."""
    kv_cache_usage: float = 0.0
    """Share of the KV blocks in use at the last report."""
    reports: int = 0
    tokens_since_report: int = 0
    """Of legs sent after the last report and not over yet. A rank without change reports nothing."""
    last_use: int = field(default=0)
    cached: CachedBlocks | None = None
    """What its prefix cache has; None while the node tells nothing of it."""
    shape: StepShape = field(init=False)

    def __post_init__(self) -> None:
        self.shape = StepShape.of(self.node, self.rank)

    @property
    def key(self) -> RankKey:
        """Names the rank."""
        return self.node.address, self.rank.local_rank

    @property
    def requests(self) -> int:
        """Requests on the rank: our own, and as the last report had them those of other proxies."""
        return self.of_others + self.in_flight

    @property
    def below_window(self) -> bool:
        """True too for an idle rank, so a prompt that is larger than the window still goes.

        False while decode leaves too much on the rank: else there would be no room for the prompts that
        decode has reserved its own blocks for.
        """
        room = self.held_limit_tokens is None or self.held_tokens < self.held_limit_tokens
        return room and self.outstanding_tokens < self.window_tokens

    @property
    def free_kv_tokens(self) -> float:
        """Of decode: tokens for which blocks are free, less what was sent since; infinite if not known."""
        if not self.rank.num_kv_blocks:
            return math.inf
        free = (1.0 - self.kv_cache_usage) * self.rank.num_kv_blocks * self.node.key.block_size
        return free - self.tokens_since_report

    def report(self, num_running: int, num_waiting: int, kv_cache_usage: float = 0.0) -> None:
        """Take over what the node says."""
        self.of_others = max(0, num_running + num_waiting - self.in_flight)
        self.kv_cache_usage = kv_cache_usage
        self.reports += 1
        self.tokens_since_report = 0

    def begin(self, tokens: int) -> int:
        """A leg was sent: on prefill with so many tokens to compute, on decode with so many to hold.

        Returns what `end` has to be told.
        """
        self.outstanding_tokens += tokens
        self.tokens_since_report += tokens
        self.in_flight += 1
        self.last_use = next(_uses)
        return self.reports

    def end(self, tokens: int, begun: int) -> None:
        """That leg is over."""
        self.outstanding_tokens -= tokens
        self.in_flight -= 1
        if begun == self.reports:
            self.tokens_since_report -= tokens

    def hold(self, tokens: int) -> None:
        """The prompt is computed, its KV not on decode yet."""
        self.held_tokens += tokens

    def let_go(self, tokens: int) -> None:
        """Its KV is on decode, or nobody wants it."""
        self.held_tokens -= tokens
