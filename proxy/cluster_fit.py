"""Which nodes can work together: whole groups, pairs of one key, and why a node has none; pure functions."""

from collections.abc import Iterable, Sequence

from proxy.nodes import CompatibilityKey, Node, Role

GroupKey = tuple[Role, str, CompatibilityKey]
"""Nodes of one data-parallel group, one for each host, agree in all three."""


def group_of(node: Node) -> GroupKey:
    """Names the data-parallel group that a node belongs to."""
    return node.role, node.group_id, node.key


def missing_ranks(node: Node, members: Iterable[Node]) -> list[int]:
    """Global ranks of the node's group that none of the members has, ascending.

    The failure unit is the group: its ranks meet in every MoE layer, so without one the others stand still.
    """
    there = {rank.global_rank for member in members for rank in member.ranks}
    # 0 from a node that says nothing of it.
    return sorted(set(range(node.description.engine.data_parallel_size)) - there)


def paired(nodes: Sequence[Node]) -> list[Node]:
    """Those of the nodes that have a peer of the other role and the same key among them."""
    keys = [{node.key for node in nodes if node.role == role} for role in ("prefill", "decode")]
    both = keys[0] & keys[1]
    return [node for node in nodes if node.key in both]


def first_pair(nodes: Sequence[Node]) -> tuple[Node, Node] | None:
    """The first prefill node that has a peer, and its first peer."""
    for prefill in nodes:
        for decode in nodes:
            if prefill.role == "prefill" and decode.role == "decode" and prefill.key == decode.key:
                return prefill, decode
    return None


def refusal(node: Node, peers: Sequence[Node]) -> str:
    """Why no peer fits, against the first of them; empty when one fits or none is there to compare with."""
    differences = [(peer, node.key.difference(peer.key)) for peer in peers]
    if not differences or any(difference is None for _, difference in differences):
        return ""
    peer, difference = differences[0]
    assert difference is not None
    field, mine, theirs = difference
    return f"{field} is {mine!r}, but {theirs!r} on {peer.role} node {peer.address}"
