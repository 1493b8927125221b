"""Keeps a session to every node that the sources list, and lets go of those that they no longer do."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from proxy.discovery.source import Nodes, Source
from proxy.nodes import Role

logger = logging.getLogger(__name__)

_LEFT_POLL_S = 0.2
_RESTART_S = 5.0


class Session(Protocol):
    """What is needed of a proxy.session.NodeSession."""

    def start(self) -> None: ...

    async def close(self) -> None: ...


class Members(Protocol):
    """Who is told; proxy.flow.Flow in the service."""

    def join(self, address: str, role: Role) -> None:
        """The address is listed (again)."""

    def leave(self, address: str) -> None:
        """It is no longer listed, and gets nothing new."""

    def is_used(self, address: str) -> bool:
        """Whether a running request still needs the node."""

    def forget(self, address: str) -> None:
        """Its session is closed, nothing is left of it."""


@dataclass(slots=True)
class _Member:
    role: Role
    session: Session
    leaving: bool = False


class Membership:
    """One of each proxy. An address has one session at a time, and one role.

    Used from the event loop only.
    """

    def __init__(self, members: Members, open_session: Callable[[str, Role], Session]) -> None:
        self._told = members
        self._open_session = open_session
        self._reports: dict[int, Nodes] = {}
        self._members: dict[str, _Member] = {}
        self._contradictions: set[str] = set()
        self._left = asyncio.Event()

    @contextlib.asynccontextmanager
    async def following(self, fixed: Nodes, sources: Sequence[Source]) -> AsyncIterator[None]:
        """Follow the sources, beside nodes that are always listed; all sessions are closed in the end."""
        self._report(-1, fixed)
        tasks = [asyncio.create_task(self._close_left(), name="members that left")]
        tasks += [
            asyncio.create_task(self._follow(number, source), name=source.name)
            for number, source in enumerate(sources)
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(member.session.close() for member in self._members.values()))

    async def _follow(self, number: int, source: Source) -> None:
        while True:
            try:
                await source.watch(lambda nodes: self._report(number, nodes))
            except Exception:  # this task's supervisor: what a source says must not end the following
                logger.exception("%s failed; its last nodes stay", source.name)
            await asyncio.sleep(_RESTART_S)

    def _report(self, number: int, nodes: Nodes) -> None:
        self._reports[number] = dict(nodes)
        self._reconcile()

    def _wanted(self) -> dict[str, Role]:
        wanted: dict[str, Role] = {}
        for _, nodes in sorted(self._reports.items()):
            for address, role in nodes.items():
                if wanted.setdefault(address, role) != role and address not in self._contradictions:
                    self._contradictions.add(address)
                    logger.error("%s is listed in both roles; it is used for %s", address, wanted[address])
        return wanted

    def _reconcile(self) -> None:
        wanted = self._wanted()
        for address, member in self._members.items():
            stays = wanted.get(address) == member.role
            if stays and member.leaving:
                logger.info("%s node %s is listed again", member.role, address)
                self._told.join(address, member.role)
            elif not stays and not member.leaving:
                logger.info("%s node %s is no longer listed", member.role, address)
                self._told.leave(address)
                self._left.set()
            member.leaving = not stays
        for address, role in wanted.items():
            if address not in self._members:
                if self._reports.keys() != {-1}:
                    logger.info("%s node %s is listed", role, address)
                self._told.join(address, role)
                session = self._open_session(address, role)
                self._members[address] = _Member(role, session)
                session.start()

    async def _close_left(self) -> None:
        """Close the sessions of nodes that left, each once no request needs it."""
        while True:
            await self._left.wait()
            leaving = [address for address, member in self._members.items() if member.leaving]
            for address in leaving:
                if not self._told.is_used(address):
                    # It stays a member meanwhile: no second session to an address before the first is closed.
                    await self._members[address].session.close()
                    del self._members[address]
                    self._told.forget(address)
                    self._reconcile()  # it may be listed in another role, or again since
            if not any(member.leaving for member in self._members.values()):
                self._left.clear()
            else:
                await asyncio.sleep(_LEFT_POLL_S)
