"""What a source of nodes is: something that says, again and again, which nodes there are."""

from collections.abc import Callable, Mapping
from typing import Never, Protocol

from proxy.nodes import Role

Nodes = Mapping[str, Role]
"""Addresses and what is expected behind each."""

Report = Callable[[Nodes], None]


class Source(Protocol):
    """One place that knows nodes."""

    name: str
    """For the log."""

    async def watch(self, report: Report) -> Never:
        """Report all nodes that this source knows, at once and whenever they change, until cancelled.

        What it cannot read for the moment changes nothing: the nodes of the last report stay, since the
        sessions themselves tell which of them work.
        """
