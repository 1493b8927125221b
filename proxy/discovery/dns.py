"""Nodes from names: every address of a name is a node, as a headless Service of Kubernetes has it."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Never

from proxy.discovery.addresses import join_host_port, split_host_port
from proxy.discovery.source import Report
from proxy.nodes import Role

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
"""The system's resolver gives up by itself after about as long; its thread is not waited for any longer."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a host. Raises OSError if it has none, or if they cannot be had now."""


async def system_resolve(host: str, port: int) -> list[str]:
    """By the system's resolver: /etc/hosts, search domains and all. IPv6 only for a host without IPv4.

    A pod of a dual-stack cluster has an address of each family, and would be two nodes.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    by_family: dict[int, list[str]] = {}
    for family, _, _, _, address in found:
        by_family.setdefault(family, []).append(str(address[0]))
    return by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or []


class Names:
    """Names of one role. One that has no address now keeps those it had.

    An answer without addresses is also what a name server gives that knows nothing yet, so it must not empty
    a cluster that works; nodes that really are gone are away by their sessions.
    """

    def __init__(
        self, role: Role, names: Sequence[str], interval_s: float, resolve: Resolve = system_resolve
    ) -> None:
        self.name = f"DNS {', '.join(names)}"
        self._role: Role = role
        self._interval_s = interval_s
        self._resolve = resolve
        self._addresses: dict[str, list[str]] = {name: [] for name in names}
        self._complaints: dict[str, str] = {}

    async def watch(self, report: Report) -> Never:
        """As `Source.watch`."""
        last: dict[str, Role] | None = None
        while True:
            await asyncio.gather(*(self._look_up(name) for name in self._addresses))
            nodes = {address: self._role for found in self._addresses.values() for address in found}
            if nodes != last:
                report(nodes)
                last = nodes
            await asyncio.sleep(self._interval_s)

    async def _look_up(self, name: str) -> None:
        host, port = split_host_port(name)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                found = await self._resolve(host, port)
            complaint = "" if found else "it has no address"
        except TimeoutError:
            complaint = f"no answer within {_TIMEOUT_S:g} s"
        except OSError as error:
            complaint = str(error)
        if not complaint:
            self._addresses[name] = sorted({join_host_port(address, port) for address in found})
        if complaint != self._complaints.get(name, ""):
            self._complaints[name] = complaint
            if complaint:
                logger.warning("%s: %s; the nodes it had stay", name, complaint)
            else:
                logger.info("%s is found", name)
