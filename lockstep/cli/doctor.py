"""The `lockstep doctor` command: asks a proxy for its nodes, asks those, and has the answers judged."""

import asyncio
from collections.abc import Sequence

from lockstep.cli.status import fetch, parse
from lockstep.doctor.ask import describe_all
from lockstep.doctor.findings import Finding
from lockstep.doctor.report import examine
from lockstep.errors import UnavailableError


def examine_cluster(url: str, addresses: Sequence[str], timeout_s: float) -> list[Finding]:
    """All findings about the nodes at `addresses` and, unless `url` is empty, the proxy there and its nodes.

    Raises UnavailableError for a proxy that does not answer, InternalError for one of another version.
    """
    document = None
    if url:
        try:
            document = parse(fetch(url, timeout_s))
        except UnavailableError as error:
            raise UnavailableError(
                f"{error}; without a proxy, give --node HOST:PORT for each node"
            ) from error
        addresses = list(dict.fromkeys([*addresses, *(node.address for node in document.nodes)]))
    nodes, silent = asyncio.run(describe_all(addresses, timeout_s))
    return [*silent, *examine(nodes, document, url.rstrip("/"))]
