"""What the proxy knows of the cluster: each node's state, which nodes pair, and why it is not ready."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.status import NodeState
from proxy.nodes import CompatibilityKey, Node, Role

logger = logging.getLogger(__name__)


REFUSED = "refused: "
"""Begins the reason of a node that answers but cannot be used as it is."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One address of the flags and what is behind it, for people."""

    address: str
    role: Role
    state: NodeState
    reason: str
    """Empty for a live node."""
    node: Node | None
    """As last described."""


@dataclass(slots=True)
class _Entry:
    role: Role
    state: str = "not connected yet"
    node: Node | None = None
    """As last described; kept while the node is away, so that rank numbers stay."""
    live: bool = False
    refusal: str = ""


class Cluster:
    """Static lists of addresses and what is behind each; no I/O here.

    The front end serves one model, so the key of the first pair is the one that is served. Nodes of other
    keys may run beside it; this proxy does not use them.
    """

    def __init__(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self._entries = {address: _Entry("prefill") for address in prefill}
        for address in decode:
            if address in self._entries:
                raise ValueError(f"{address} is listed as both a prefill and a decode node")
            self._entries[address] = _Entry("decode")
        self.key: CompatibilityKey | None = None

    def up(self, node: Node) -> None:
        """A session with the node is open."""
        entry = self._entries[node.address]
        entry.node, entry.live, entry.state = node, True, "connected"
        self._judge()

    def down(self, address: str, reason: str) -> None:
        """The node cannot take requests; `reason` completes "<address>: ..."."""
        entry = self._entries[address]
        entry.live, entry.state, entry.refusal = False, reason, ""
        self._judge()

    def live(self, role: Role) -> Iterator[Node]:
        """Nodes of the served key that take requests."""
        for node, is_live in self._of_served_key(role):
            if is_live:
                yield node

    def known(self, role: Role) -> Iterator[Node]:
        """Nodes of the served key, those that are away too, in the order of the flags."""
        for node, _ in self._of_served_key(role):
            yield node

    def pair(self) -> tuple[Node, Node] | None:
        """A prefill and a decode node that fit together, if there is one."""
        prefill, decode = next(self.live("prefill"), None), next(self.live("decode"), None)
        return (prefill, decode) if prefill and decode else None

    def not_ready_because(self) -> str:
        """Empty when a compatible pair is live; otherwise one line that names each node and its state."""
        if self.pair():
            return ""
        states = (f"{e.role} {a}: {e.refusal or self._aside(e) or e.state}" for a, e in self._entries.items())
        return "; ".join(states)

    def listed(self) -> list[Listed]:
        """All addresses, in the order of the flags."""
        return [
            Listed(address, entry.role, *self._state(entry), entry.node)
            for address, entry in self._entries.items()
        ]

    def _state(self, entry: _Entry) -> tuple[NodeState, str]:
        if not entry.live:
            refused = entry.state.startswith(REFUSED)
            return ("refused" if refused else "away"), entry.state.removeprefix(REFUSED)
        if entry.refusal:
            return "refused", entry.refusal
        aside = self._aside(entry)
        return ("aside" if aside else "live"), aside

    def _of_served_key(self, role: Role) -> Iterator[tuple[Node, bool]]:
        for entry in self._entries.values():
            if entry.role == role and entry.node is not None and entry.node.key == self.key:
                yield entry.node, entry.live

    def _aside(self, entry: _Entry) -> str:
        if not entry.live or entry.node is None or self.key is None or entry.node.key == self.key:
            return ""
        return "connected, but another model or version is served here"

    def _judge(self) -> None:
        """Choose the served key at the first pair, and refuse live nodes that no live peer fits."""
        live = [(e, e.node) for e in self._entries.values() if e.live and e.node is not None]
        if self.key is None:
            self.key = next(
                (a.key for _, a in live for _, b in live if a.role < b.role and a.key == b.key), None
            )
        for entry, node in live:
            refusal = _refusal(node, [peer for _, peer in live if peer.role != node.role])
            if refusal and refusal != entry.refusal:
                logger.warning("%s node %s is refused: %s", node.role, node.address, refusal)
            if entry.refusal and not refusal:
                logger.info("%s node %s fits a peer now", node.role, node.address)
            entry.refusal = refusal


def _refusal(node: Node, peers: Sequence[Node]) -> str:
    """Why no peer fits, against the first of them; empty when one fits or none is there to compare with."""
    differences = [(peer, node.key.difference(peer.key)) for peer in peers]
    if not differences or any(difference is None for _, difference in differences):
        return ""
    peer, difference = differences[0]
    assert difference is not None
    field, mine, theirs = difference
    return f"{field} is {mine!r}, but {theirs!r} on {peer.role} node {peer.address}"
