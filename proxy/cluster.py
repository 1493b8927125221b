"""What the proxy knows of the cluster: each node's state, which nodes pair, and why it is not ready."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.status import NodeState
from proxy import cluster_fit
from proxy.nodes import CompatibilityKey, Node, Role
from proxy.served import Served

logger = logging.getLogger(__name__)


REFUSED = "refused: "
"""Begins the reason of a node that answers but cannot be used as it is."""

_ASIDE = "connected, but another model or version is served here"


@dataclass(frozen=True, slots=True)
class Listed:
    """One address and what is behind it, for people."""

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
    incomplete: str = ""
    """Why its group cannot work, though the node itself could."""
    suspect: str = ""
    leaving: bool = False
    """No longer listed; it finishes what it has."""


class Cluster:
    """The nodes that are listed and what is behind each; no I/O here.

    One `Served` is served at a time, at first that of the first pair. All nodes that it includes are used,
    side by side if their compatibility keys differ: a request's two legs go to nodes of one key. `succeed`
    passes on to another one, once no pair of the one before is left.
    """

    def __init__(self, prefill: Sequence[str] = (), decode: Sequence[str] = ()) -> None:
        self._entries: dict[str, _Entry] = {}
        self._usable: list[Node] = []
        self._chosen: dict[Served, list[Node]] = {}
        """What `live` chooses from, until something changes."""
        self.served: Served | None = None
        for address in prefill:
            self.join(address, "prefill")
        for address in decode:
            self.join(address, "decode")

    # Membership.

    def join(self, address: str, role: Role) -> None:
        """List an address, or list it again before it was forgotten. Raises ValueError for another role."""
        entry = self._entries.setdefault(address, _Entry(role))
        if entry.role != role:
            raise ValueError(f"{address} is listed as both a prefill and a decode node")
        entry.leaving = False
        self._judge()

    def leave(self, address: str) -> None:
        """The address is no longer listed: it gets nothing new, and finishes what it has."""
        self._entries[address].leaving = True
        self._judge()

    def forget(self, address: str) -> None:
        """Nothing is left of the address."""
        del self._entries[address]
        self._judge()

    # What the sessions report.

    def up(self, node: Node) -> None:
        """A session with the node is open."""
        entry = self._entries[node.address]
        entry.node, entry.live, entry.state, entry.suspect = node, True, "connected", ""
        self._judge()

    def down(self, address: str, reason: str) -> None:
        """The node cannot take requests; `reason` completes "<address>: ..."."""
        entry = self._entries[address]
        entry.live, entry.state, entry.refusal, entry.suspect = False, reason, "", ""
        self._judge()

    def suspect(self, address: str, reason: str) -> None:
        """The node does not step though it has work, which holds up its group; empty: it steps again."""
        entry = self._entries.get(address)  # None: forgotten meanwhile
        if entry is not None and entry.suspect != reason:
            entry.suspect = reason
            self._judge()

    # What there is to choose from.

    def live(
        self, role: Role, served: Served | None = None, key: CompatibilityKey | None = None
    ) -> list[Node]:
        """Nodes that take requests of a front end; `served` is the current one if not given.

        Suspect groups are left out as long as a pair without them is there, nodes without a peer as long as
        any pair is.
        """
        served = served or self.served
        nodes = self._of(served) if served else []
        return [node for node in nodes if node.role == role and (key is None or node.key == key)]

    def known(self, role: Role, served: Served | None = None) -> list[Node]:
        """Nodes that a front end includes, those that are away too, in the order of listing."""
        served = served or self.served
        return [
            entry.node
            for entry in self._entries.values()
            if entry.role == role and entry.node is not None and served and served.includes(entry.node)
        ]

    def group(self, address: str) -> list[str]:
        """The addresses of the node's data-parallel group, its own included, those that are away too."""
        entry = self._entries.get(address)
        if entry is None or entry.node is None:
            return [address]
        key = cluster_fit.group_of(entry.node)
        return [a for a, e in self._entries.items() if e.node and cluster_fit.group_of(e.node) == key]

    def pair(self) -> tuple[Node, Node] | None:
        """A prefill and a decode node that fit together, of what is served, if there is one."""
        return cluster_fit.first_pair(self._of(self.served)) if self.served else None

    def spare_pair(self, without: Iterable[str], served: Served | None = None) -> bool:
        """Whether a pair is left of what a front end serves when these addresses are not used."""
        left_out, served = set(without), served or self.served
        nodes = [n for n in self._usable if served and served.includes(n)]
        return cluster_fit.first_pair([n for n in nodes if n.address not in left_out]) is not None

    def successor(self) -> tuple[Node, Node] | None:
        """A pair that another front end could serve, while the current one has none; None if it has."""
        return None if self.pair() else cluster_fit.first_pair(self._usable)

    def succeed(self, served: Served) -> None:
        """From now on this is served."""
        self.served = served
        self._judge()

    # For people.

    def not_ready_because(self) -> str:
        """Empty when a compatible pair is live; otherwise one line that names each node and its state."""
        if self.pair():
            return ""
        states = (f"{e.role} {a}: {self._why(e) or e.state}" for a, e in self._entries.items())
        return "; ".join(states) or "no node is listed"

    def listed(self) -> list[Listed]:
        """All addresses, in the order of listing."""
        return [
            Listed(address, entry.role, *self._state(entry), entry.node)
            for address, entry in self._entries.items()
        ]

    def count(self, role: str, state: str) -> int:
        """Listed nodes in a state; suspects are not among those that stand aside."""
        states = [
            "suspect" if entry.live and entry.suspect and not entry.refusal else self._state(entry)[0]
            for entry in self._entries.values()
            if entry.role == role
        ]
        return states.count(state)

    def _state(self, entry: _Entry) -> tuple[NodeState, str]:
        if not entry.live:
            refused = entry.state.startswith(REFUSED)
            return ("refused" if refused else "away"), entry.state.removeprefix(REFUSED)
        if entry.refusal:
            return "refused", entry.refusal
        why = self._why(entry)
        return ("aside" if why else "live"), why

    def _why(self, entry: _Entry) -> str:
        """Why a node with an open session is not used; empty if it is or has none."""
        if not entry.live or entry.node is None:
            return ""
        if entry.refusal or entry.incomplete or entry.suspect:
            return entry.refusal or entry.incomplete or entry.suspect
        if entry.leaving:
            return "no longer listed, it finishes what it has"
        other = self.served is not None and not self.served.includes(entry.node)
        return _ASIDE if other else ""

    def _of(self, served: Served) -> list[Node]:
        if served not in self._chosen:
            self._chosen[served] = self._choose(served)
        return self._chosen[served]

    def _choose(self, served: Served) -> list[Node]:
        nodes = [node for node in self._usable if served.includes(node)]
        suspects = {cluster_fit.group_of(e.node) for e in self._entries.values() if e.node and e.suspect}
        if suspects:
            # With nothing else to turn to a suspect is better than an error: it may only be slow.
            trusted = cluster_fit.paired([n for n in nodes if cluster_fit.group_of(n) not in suspects])
            if trusted:
                return trusted
        return cluster_fit.paired(nodes) or nodes

    def _judge(self) -> None:
        """Find the usable nodes, choose what is served at the first pair, refuse those that no peer fits."""
        connected = [(e, e.node) for e in self._entries.values() if e.live and e.node is not None]
        members: dict[cluster_fit.GroupKey, list[Node]] = {}
        for entry, node in connected:
            if not entry.leaving:
                members.setdefault(cluster_fit.group_of(node), []).append(node)
        seen = {node.instance_id: node.address for entry, node in reversed(connected) if not entry.leaving}
        self._usable = []
        self._chosen.clear()
        for entry, node in connected:
            self._note_refusal(entry, node, [peer for _, peer in connected if peer.role != node.role])
            entry.incomplete = _incomplete(node, members.get(cluster_fit.group_of(node), []))
            twin = seen.get(node.instance_id, node.address)
            if twin != node.address:
                entry.incomplete = f"the same node as {twin}"
            if not entry.leaving and not entry.incomplete:
                self._usable.append(node)
        if self.served is None:
            pair = self.successor()
            self.served = Served.by(*pair) if pair else None

    def _note_refusal(self, entry: _Entry, node: Node, peers: Sequence[Node]) -> None:
        refusal = cluster_fit.refusal(node, peers)
        if refusal and refusal != entry.refusal:
            logger.warning("%s node %s is refused: %s", node.role, node.address, refusal)
        if entry.refusal and not refusal:
            logger.info("%s node %s fits a peer now", node.role, node.address)
        entry.refusal = refusal


def _incomplete(node: Node, members: Sequence[Node]) -> str:
    missing = cluster_fit.missing_ranks(node, members)
    if not missing or not members:
        return ""
    return f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of its group not connected"
