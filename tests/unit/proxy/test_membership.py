"""Sessions follow what the sources say: joins, leaves, returns, a changed role, contradictions."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Never

import pytest
from unit.proxy.sources_for_tests import proxy_log

from proxy.discovery.membership import Membership
from proxy.discovery.source import Nodes, Report
from proxy.nodes import Role

DEADLINE_S = 5.0


captured = pytest.fixture(autouse=True)(proxy_log)


class Pushed:
    """A source that says what a test tells it to."""

    name = "pushed"

    def __init__(self) -> None:
        self.report: Report = lambda nodes: None
        self.started = asyncio.Event()

    async def watch(self, report: Report) -> Never:
        self.report = report
        self.started.set()
        await asyncio.Event().wait()
        raise AssertionError("never set")


class World:
    """Notes what the membership does, in order; an address in `used` has a running request."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.used: set[str] = set()
        self.open: dict[str, Role] = {}

    def join(self, address: str, role: Role) -> None:
        self.told.append(f"join {role} {address}")

    def leave(self, address: str) -> None:
        self.told.append(f"leave {address}")

    def is_used(self, address: str) -> bool:
        return address in self.used

    def forget(self, address: str) -> None:
        assert address not in self.open
        self.told.append(f"forget {address}")

    def session(self, address: str, role: Role) -> "Session":
        return Session(self, address, role)

    async def says(self, *told: str) -> None:
        """These come next, and nothing else."""
        async with asyncio.timeout(DEADLINE_S):
            while len(self.told) < len(told):  # noqa: ASYNC110 - polled as the membership polls
                await asyncio.sleep(0.005)
        assert self.told == list(told)
        self.told.clear()


class Session:
    """Only one may be open to an address."""

    def __init__(self, world: World, address: str, role: Role) -> None:
        self._world, self._address, self._role = world, address, role

    def start(self) -> None:
        assert self._address not in self._world.open
        self._world.open[self._address] = self._role

    async def close(self) -> None:
        await asyncio.sleep(0)
        del self._world.open[self._address]


@contextlib.asynccontextmanager
async def following(fixed: Nodes, *sources: Pushed) -> AsyncIterator[World]:
    world = World()
    async with Membership(world, world.session).following(fixed, sources):
        for source in sources:
            await source.started.wait()
        yield world
    assert not world.open


async def test_fixed_nodes_stay_whatever_a_source_says() -> None:
    """Sources add to each other."""
    source = Pushed()
    async with following({"p:1": "prefill"}, source) as world:
        source.report({"d:1": "decode"})
        await world.says("join prefill p:1", "join decode d:1")
        source.report({})
        await world.says("leave d:1", "forget d:1")
        assert world.open == {"p:1": "prefill"}


async def test_session_of_a_node_that_left_is_closed_when_nothing_runs_there() -> None:
    """A running stream keeps it open."""
    source = Pushed()
    async with following({}, source) as world:
        source.report({"d:1": "decode", "d:2": "decode"})
        world.told.clear()
        world.used.add("d:1")
        source.report({"d:2": "decode"})
        await world.says("leave d:1")
        await asyncio.sleep(0.5)  # it is looked at every 0.2 s
        assert world.told == []
        assert world.open.keys() == {"d:1", "d:2"}
        world.used.clear()
        await world.says("forget d:1")
        assert world.open.keys() == {"d:2"}


async def test_node_that_is_listed_again_keeps_its_session() -> None:
    """A name server's short gap must cost no stream."""
    source = Pushed()
    async with following({}, source) as world:
        source.report({"d:1": "decode"})
        world.used.add("d:1")
        source.report({})
        source.report({"d:1": "decode"})
        await world.says("join decode d:1", "leave d:1", "join decode d:1")
        world.used.clear()
        await asyncio.sleep(0.5)
        assert world.told == []


async def test_address_that_changes_its_role() -> None:
    """The old node is let go of first."""
    source = Pushed()
    async with following({}, source) as world:
        source.report({"a:1": "prefill"})
        source.report({"a:1": "decode"})
        await world.says("join prefill a:1", "leave a:1", "forget a:1", "join decode a:1")
        assert world.open == {"a:1": "decode"}


async def test_contradiction_is_an_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The first source is right; it is said once."""
    first, second = Pushed(), Pushed()
    async with following({}, first, second) as world:
        first.report({"a:1": "prefill"})
        for nodes in ({"a:1": "decode"}, {"a:1": "decode", "b:1": "decode"}):
            second.report(nodes)  # type: ignore[arg-type]
        await world.says("join prefill a:1", "join decode b:1")
        assert caplog.text.count("a:1 is listed in both roles; it is used for prefill") == 1


async def test_source_that_fails_keeps_its_nodes(caplog: pytest.LogCaptureFixture) -> None:
    """And does not end the following of the others."""

    class Failing(Pushed):
        async def watch(self, report: Report) -> Never:
            report({"a:1": "prefill"})
            self.started.set()
            raise RuntimeError("a fault of its own")

    other = Pushed()
    async with following({}, Failing(), other) as world:
        other.report({"b:1": "decode"})
        await world.says("join prefill a:1", "join decode b:1")
        assert "its last nodes stay" in caplog.text
