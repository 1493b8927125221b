"""Puts the findings about a whole cluster together, and shows them to people and to programs."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from lockstep.doctor.cluster_checks import check_cluster
from lockstep.doctor.described import Described
from lockstep.doctor.findings import Finding, Level
from lockstep.doctor.node_checks import check_node
from lockstep.doctor.proxy_checks import check_proxy
from lockstep.status import StatusDocument

_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "bold red"}


def examine(nodes: Sequence[Described], document: StatusDocument | None, url: str) -> list[Finding]:
    """All findings: of each node, between nodes, and of the proxy where there is one."""
    findings = [finding for node in nodes for finding in check_node(node)]
    findings += check_cluster(nodes)
    if document is not None:
        findings += check_proxy(document, url, nodes)
    return findings


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Warnings are allowed."""
    return all(finding.level is not Level.ERROR for finding in findings)


def as_document(findings: Sequence[Finding]) -> dict[str, Any]:
    """`healthy`, and `findings` with the fields of `Finding`."""
    return {"healthy": is_healthy(findings), "findings": [asdict(finding) for finding in findings]}


def tables(findings: Sequence[Finding]) -> Iterator[Table | Text]:
    """One table for each place, then one line with the numbers."""
    for where in dict.fromkeys(finding.where for finding in findings):
        table = Table(title=where, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column("", no_wrap=True)
        table.add_column("Check", no_wrap=True)
        table.add_column("Found", overflow="fold")
        here = [finding for finding in findings if finding.where == where]
        if any(finding.instead for finding in here):
            table.add_column("What works", overflow="fold")
        for finding in here:
            level = Text(finding.level, style=_STYLES[finding.level])
            cells = (finding.check, finding.text, finding.instead)
            table.add_row(level, *cells[: len(table.columns) - 1])
        yield table
        yield Text()
    numbers = Counter(finding.level for finding in findings)
    yield Text(", ".join(f"{numbers[level]} {level}" for level in Level))
