"""Nodes from a file that is read again and again: one node a line, its role and its address."""

import asyncio
import logging
from pathlib import Path
from typing import Never

from lockstep.errors import ConfigError
from proxy.discovery.addresses import split_host_port
from proxy.discovery.source import Nodes, Report
from proxy.nodes import Role

logger = logging.getLogger(__name__)

_ROLES: dict[str, Role] = {"prefill": "prefill", "decode": "decode"}


def parse(text: str) -> dict[str, Role]:
    """Read the file's text; `#` begins a comment. Raises ValueError that names the line."""
    nodes: dict[str, Role] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or words[0] not in _ROLES:
            raise ValueError(f'line {number} is not "prefill HOST:PORT" or "decode HOST:PORT"')
        role, address = words
        try:
            split_host_port(address)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        if address in nodes:
            raise ValueError(f"line {number}: {address} is listed twice")
        nodes[address] = _ROLES[role]
    return nodes


class NodesFile:
    """Compares the text, not the time of change: a ConfigMap is replaced by a link to another file."""

    def __init__(self, path: Path, interval_s: float) -> None:
        """Raises ConfigError for a file that cannot be used now. Later that only keeps the last nodes."""
        self.name = f"file {path}"
        self._path = path
        self._interval_s = interval_s
        try:
            self._text = self._read()
            self._nodes: Nodes = parse(self._text)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--nodes-file: {path}: {error}") from error

    async def watch(self, report: Report) -> Never:
        """As `Source.watch`."""
        report(self._nodes)
        complained = ""
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                text = await asyncio.to_thread(self._read)
                if text == self._text and not complained:
                    continue
                self._nodes, self._text, complained = parse(text), text, ""
                report(self._nodes)
            except (OSError, ValueError) as error:
                if str(error) != complained:
                    complained = str(error)
                    logger.error("%s: %s; its last nodes stay", self.name, complained)

    def _read(self) -> str:
        return self._path.read_text(encoding="utf-8")
