"""The `lockstep doctor` command: asks a proxy for its nodes, asks those, and has the answers judged."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from lockstep.cli.status import fetch, parse
from lockstep.doctor.ask import describe_all
from lockstep.doctor.findings import Finding
from lockstep.doctor.report import examine
from lockstep.errors import UnavailableError
from lockstep.rpc.credentials import CallerConfig, of_caller


def examine_cluster(
    url: str, addresses: Sequence[str], timeout_s: float, key_file: Path | None = None
) -> list[Finding]:
    """All findings about the nodes at `addresses` and, unless `url` is empty, the proxy there and its nodes.

    Nodes are shown the credentials that a proxy in this environment would show (LOCKSTEP_GRPC_TOKEN_FILE and
    the like), a proxy the key of `key_file`. Raises UnavailableError for a proxy that does not answer,
    InternalError for one of another version, ConfigError for a file that cannot be used.
    """
    config, _ = CallerConfig.load((), "lockstep doctor", "")
    credentials = of_caller(config)
    document = None
    if url:
        try:
            document = parse(fetch(url, timeout_s, key_file))
        except UnavailableError as error:
            raise UnavailableError(
                f"{error}; without a proxy, give --node HOST:PORT for each node"
            ) from error
        addresses = list(dict.fromkeys([*addresses, *(node.address for node in document.nodes)]))
    nodes, silent = asyncio.run(describe_all(addresses, timeout_s, credentials))
    return [*silent, *examine(nodes, document, url.rstrip("/"))]
