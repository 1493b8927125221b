"""Tells each prefill node to which decode engines KV may go; it shakes hands with no other."""

from proxy.nodes import Node
from proxy.session import NodeSession


class Announcements:
    """Both ways round, whichever of two nodes connects last, and before any leg that needs both."""

    def __init__(self) -> None:
        self._prefill: dict[str, NodeSession] = {}
        self._engine_ids: dict[str, list[str]] = {}

    def opened(self, session: NodeSession, node: Node) -> None:
        """A session is open; what is put into it now comes before all legs."""
        if node.role == "prefill":
            self._prefill[node.address] = session
            if self._engine_ids:
                session.announce([one for ids in self._engine_ids.values() for one in ids])
            return
        self._engine_ids[node.address] = [rank.engine_id for rank in node.ranks]
        for prefill in self._prefill.values():
            prefill.announce(self._engine_ids[node.address])

    def closed(self, address: str) -> None:
        """The node itself forgets no engine: what is under way ends without its proxy."""
        self._prefill.pop(address, None)
        self._engine_ids.pop(address, None)
