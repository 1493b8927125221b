"""The ranks of all nodes whose session is open, and which of them a policy may choose from."""

from collections.abc import Iterable, Mapping, Sequence

from lockstep.errors import InvalidRequestError, NoDecodeNodeError, NoPrefillNodeError
from lockstep.rpc.generated import lockstep_pb2 as pb
from proxy.nodes import Node, Rank
from proxy.routing import affinity
from proxy.routing.asked import Asked
from proxy.routing.cached_blocks import CachedBlocks
from proxy.routing.load import RankKey, RankLoad
from proxy.routing.lockstep import Lockstep
from proxy.routing.policy import RoutingPolicy


class Ranks:
    """By address. A rank that the request failed on comes after all others, the last such the very last."""

    def __init__(self, prefill_window_tokens: int | None, policy: RoutingPolicy | None = None) -> None:
        self._window_tokens = prefill_window_tokens
        self._policy = policy if policy is not None else Lockstep()
        self._loads: dict[str, dict[int, RankLoad]] = {}

    @property
    def reads_prefixes(self) -> bool:
        """Whether `Asked.prefix` is of use."""
        return self._policy.reads_prefixes

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

    def report(
        self, address: str, local_rank: int, num_running: int, num_waiting: int, kv_cache_usage: float = 0.0
    ) -> None:
        """Take over a load report; one for a rank that the node did not describe is dropped."""
        load = self._loads.get(address, {}).get(local_rank)
        if load is not None:
            load.report(num_running, num_waiting, kv_cache_usage)

    def kv_blocks(self, address: str, frame: pb.KVBlocks) -> bool:
        """Take over what a prefix cache has; False if the node has to be asked for a snapshot."""
        load = self._loads.get(address, {}).get(frame.rank)
        if load is None or not self._policy.reads_prefixes:
            return True
        if load.cached is None:
            load.cached = CachedBlocks(load.rank.num_kv_blocks)
        return load.cached.take(frame)

    def pick_prefill(self, nodes: Iterable[Node], asked: Asked) -> RankLoad | None:
        """The policy's choice, or None while all ranks that it may be are at their window.

        A request that failed on a rank waits for the others: a broken rank has room, and refuses at once.
        Raises NoPrefillNodeError without a live rank.
        """
        loads = self._of(nodes)
        if not loads:
            raise NoPrefillNodeError("No prefill node is ready.")
        choice = [load for load in _least_failed(loads, asked.failed_at) if load.below_window]
        if not choice:
            return None
        if asked.session is not None:
            return affinity.chosen_by(asked.session, choice)
        return self._policy.prefill(choice, asked)

    def pick_decode(self, nodes: Iterable[Node], asked: Asked) -> RankLoad | None:
        """The policy's choice, or None if the attempt has to wait. Raises NoDecodeNodeError without a rank.

        Of a session it is the session's rank, unless the policy has that one take no more.
        """
        loads = self._of(nodes)
        if not loads:
            raise NoDecodeNodeError("No decode node is ready.")
        choice = _least_failed(loads, asked.failed_at)
        if asked.session is not None:
            own = affinity.chosen_by(asked.session, choice)
            return self._policy.decode([own], loads, asked) or self._policy.decode(choice, loads, asked)
        return self._policy.decode(choice, loads, asked)

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


def _least_failed(loads: Sequence[RankLoad], failed_at: Mapping[RankKey, int]) -> Sequence[RankLoad]:
    if not failed_at or not loads:
        return loads
    least = min(failed_at.get(load.key, 0) for load in loads)
    return [load for load in loads if failed_at.get(load.key, 0) == least]


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
