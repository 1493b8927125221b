"""Picks ranks: prefill by outstanding prompt tokens, decode by running and waiting requests."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lockstep.errors import InvalidRequestError, NoDecodeNodeError, NoPrefillNodeError
from proxy.nodes import Node, Rank

RankKey = tuple[str, int]
"""A rank over its node's restarts: address and local rank."""

_NONE_FAILED: Mapping[RankKey, int] = {}
_uses = itertools.count(1)


@dataclass(slots=True, eq=False)
class RankLoad:
    """One live rank and its load, as the node reports it and as this proxy knows it."""

    node: Node
    rank: Rank
    window_tokens: int
    held_limit_tokens: int | None = None
    """Of a prefill rank: what finished prompts may hold of its pool until their KV is on decode."""
    outstanding_tokens: int = 0
    held_tokens: int = 0
    in_flight: int = 0
    reported: int = 0
    """Requests running and waiting at the last report, other proxies' included."""
    sent_since_report: int = 0
    last_use: int = field(default=0)

    @property
    def key(self) -> RankKey:
        """Names the rank."""
        return self.node.address, self.rank.local_rank

    @property
    def requests(self) -> int:
        """Requests on the rank: the last report plus what it cannot know yet, never less than our own."""
        return max(self.reported + self.sent_since_report, self.in_flight)

    @property
    def below_window(self) -> bool:
        """True too for an idle rank, so a prompt that is larger than the window still goes.

        False while decode leaves too much on the rank: else there would be no room for the prompts that
        decode has reserved its own blocks for.
        """
        room = self.held_limit_tokens is None or self.held_tokens < self.held_limit_tokens
        return room and self.outstanding_tokens < self.window_tokens

    def report(self, num_running: int, num_waiting: int) -> None:
        """Take over what the node says."""
        self.reported, self.sent_since_report = num_running + num_waiting, 0

    def begin(self, tokens: int) -> None:
        """A leg of `tokens` prompt tokens was sent."""
        self.outstanding_tokens += tokens
        self.in_flight += 1
        self.sent_since_report += 1
        self.last_use = next(_uses)

    def end(self, tokens: int) -> None:
        """That leg is over."""
        self.outstanding_tokens -= tokens
        self.in_flight -= 1

    def hold(self, tokens: int) -> None:
        """The prompt is computed, its KV not on decode yet."""
        self.held_tokens += tokens

    def let_go(self, tokens: int) -> None:
        """Its KV is on decode, or nobody wants it."""
        self.held_tokens -= tokens


class Ranks:
    """The ranks of all nodes whose session is open, by address."""

    def __init__(self, prefill_window_tokens: int | None) -> None:
        self._window_tokens = prefill_window_tokens
        self._loads: dict[str, dict[int, RankLoad]] = {}

    def add(self, node: Node) -> None:
        """A session with the node opened: its ranks start without load from us."""
        self._loads[node.address] = {
            rank.local_rank: RankLoad(
                node,
                rank,
                self._window_tokens or default_window_tokens(rank.max_num_batched_tokens),
                held_limit_tokens(rank.num_kv_blocks, node.key.block_size),
            )
            for rank in node.ranks
        }

    def remove(self, address: str) -> None:
        """The session with the node ended."""
        self._loads.pop(address, None)

    def of(self, address: str) -> dict[int, RankLoad]:
        """The ranks of a node whose session is open, by local rank; to be read."""
        return self._loads.get(address, {})

    def report(self, address: str, local_rank: int, num_running: int, num_waiting: int) -> None:
        """Take over a load report; one for a rank that the node did not describe is dropped."""
        load = self._loads.get(address, {}).get(local_rank)
        if load is not None:
            load.report(num_running, num_waiting)

    def pick_prefill(
        self, nodes: Iterable[Node], failed_at: Mapping[RankKey, int] = _NONE_FAILED
    ) -> RankLoad | None:
        """The rank with the least outstanding prompt tokens, or None while all are at their window.

        A rank of `failed_at` comes after all others, the one that failed last the very last. Raises
        NoPrefillNodeError without a live rank.
        """
        loads = self._of(nodes)
        if not loads:
            raise NoPrefillNodeError("No prefill node is ready.")
        return min(
            (load for load in loads if load.below_window),
            key=lambda load: (failed_at.get(load.key, 0), load.outstanding_tokens, load.last_use),
            default=None,
        )

    def pick_decode(self, nodes: Iterable[Node], failed_at: Mapping[RankKey, int] = _NONE_FAILED) -> RankLoad:
        """The rank with the fewest requests, the longest unused one of equals; `failed_at` as for prefill.

        Raises NoDecodeNodeError without a live rank.
        """
        loads = self._of(nodes)
        if not loads:
            raise NoDecodeNodeError("No decode node is ready.")
        return min(loads, key=lambda load: (failed_at.get(load.key, 0), load.requests, load.last_use))

    def decode_at(self, known: Iterable[Node], live: Iterable[Node], index: int) -> RankLoad:
        """The decode rank that a client asked for by number (`decode_ranks` numbers them).

        Raises InvalidRequestError for a number that no rank has, NoDecodeNodeError when its node is not live.
        """
        ranks = decode_ranks(known)
        if not 0 <= index < len(ranks):
            raise InvalidRequestError(
                f"data_parallel_rank {index} is out of range [0, {len(ranks)}).", "data_parallel_rank"
            )
        node, rank = ranks[index]
        load = self._loads.get(node.address, {}).get(rank.local_rank)
        if load is None or all(node.address != other.address for other in live):
            raise NoDecodeNodeError(f"Decode rank {index} is not ready.")
        return load

    def _of(self, nodes: Iterable[Node]) -> list[RankLoad]:
        return [load for node in nodes for load in self._loads.get(node.address, {}).values()]


def default_window_tokens(max_num_batched_tokens: int) -> int:
    """Two steps' token budget: the next step's work is there when one ends, and hardly more waits."""
    return 2 * max_num_batched_tokens


def held_limit_tokens(num_kv_blocks: int, block_size: int) -> int | None:
    """Half of the pool, so that the other half is there to compute in; None if the node does not say."""
    return num_kv_blocks * block_size // 2 or None


def decode_ranks(known: Iterable[Node]) -> list[tuple[Node, Rank]]:
    """All decode ranks in the order of their numbers: groups as the flags list them, then global ranks."""
    nodes = list(known)
    groups = list(dict.fromkeys(node.group_id for node in nodes))
    ranks = [(node, rank) for node in nodes for rank in node.ranks]
    return sorted(ranks, key=lambda item: (groups.index(item[0].group_id), item[1].global_rank))
