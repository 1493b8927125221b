"""Nodes from the EndpointSlices of Kubernetes that have given labels: listed, then watched."""

import asyncio
import logging
import random
from collections.abc import Iterable
from typing import Never

from proxy.discovery.addresses import join_host_port
from proxy.discovery.kubernetes_api import Access, ApiError, Collection, GoneError, Listing, Object
from proxy.discovery.source import Report
from proxy.nodes import Role

logger = logging.getLogger(__name__)

GROUP_VERSION = "discovery.k8s.io/v1"
PLURAL = "endpointslices"

_BACKOFF_FIRST_S = 0.2
_BACKOFF_MOST_S = 10.0
_FAMILIES = ("IPv4", "IPv6")


def addresses(slices: Iterable[Object], port_name: str) -> list[str]:
    """The address of each endpoint, in order and once each; IPv6 only where there is no IPv4.

    A dual-stack Service has slices of both families for the same pods. Whether an endpoint is ready does not
    matter here: its session tells what it can do, also while it warms up or drains. An endpoint's other
    addresses are the same pod (EndpointSlice, v1: "consumers may only look at the first").
    """
    by_family: dict[str, set[str]] = {family: set() for family in _FAMILIES}
    for one in slices:
        found = by_family.setdefault(one.get("addressType", ""), set())
        ports = [p["port"] for p in one.get("ports") or () if p.get("name") == port_name and p.get("port")]
        for port in ports:
            for endpoint in one.get("endpoints") or ():
                found.update(join_host_port(address, port) for address in endpoint["addresses"][:1])
    return sorted(by_family["IPv4"] or by_family["IPv6"])


class EndpointSlices:
    """The slices of one role."""

    def __init__(self, role: Role, selector: str, port_name: str, access: Access) -> None:
        self.name = f"EndpointSlices {selector}"
        self._role: Role = role
        self._port_name = port_name
        self._selector = selector
        self._access = access
        self._last: list[str] | None = None
        self._complaint = ""

    async def watch(self, report: Report) -> Never:
        """As `Source.watch`."""
        wait_s = _BACKOFF_FIRST_S
        async with Collection(self._access, GROUP_VERSION, PLURAL, self._selector) as collection:
            while True:
                try:
                    listing = await collection.list()
                    self._tell(listing, report)
                    while True:
                        async for _ in collection.watch(listing):
                            self._tell(listing, report)
                        wait_s, self._complaint = _BACKOFF_FIRST_S, ""
                        await asyncio.sleep(_BACKOFF_FIRST_S)
                except GoneError:
                    logger.info("%s: listing anew", self.name)
                except ApiError as error:
                    self._complain(str(error))
                await asyncio.sleep(wait_s * random.uniform(0.8, 1.2))
                wait_s = min(2 * wait_s, _BACKOFF_MOST_S)

    def _tell(self, listing: Listing, report: Report) -> None:
        found = addresses(listing.objects.values(), self._port_name)
        if found != self._last:
            if not found and listing.objects:
                logger.warning("%s: no endpoint with a port named %s", self.name, self._port_name)
            self._last = found
            report(dict.fromkeys(found, self._role))

    def _complain(self, complaint: str) -> None:
        """Each new complaint once: the API server may be away for long."""
        if complaint != self._complaint:
            self._complaint = complaint
            logger.warning("%s: %s; the last nodes stay", self.name, complaint)
