"""What the file and the names say of nodes, what of their faults, and which flags must be given."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from unit.proxy.sources_for_tests import proxy_log, watched

from lockstep.errors import ConfigError
from proxy.config import ProxyConfig
from proxy.discovery import dns
from proxy.discovery.dns import Names
from proxy.discovery.nodes_file import NodesFile, parse
from proxy.discovery.source import Nodes

INTERVAL_S = 0.01
DEADLINE_S = 5.0


captured = pytest.fixture(autouse=True)(proxy_log)


async def comes(reports: list[Nodes], number: int) -> Nodes:
    """The report of this number."""
    await _until(lambda: len(reports) >= number)
    assert len(reports) == number
    return reports[-1]


def test_file_has_a_node_a_line() -> None:
    """Comments and empty lines are left out."""
    text = "# nodes\nprefill a:1\n\n  decode [::1]:2   # the second\n"
    assert parse(text) == {"a:1": "prefill", "[::1]:2": "decode"}
    assert parse("") == {}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("proxy a:1", "line 2 is not"),
        ("prefill", "line 2 is not"),
        ("prefill a:1 b:1", "line 2 is not"),
        ("decode a", "line 2: 'a' is not HOST:PORT"),
        ("decode ok:1", "line 2: ok:1 is listed twice"),
    ],
)
def test_bad_line_is_named(line: str, why: str) -> None:
    """By its number."""
    with pytest.raises(ValueError, match=why):
        parse(f"prefill ok:1\n{line}")


async def test_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where it was replaced by another one; while it is bad or gone, its last nodes stay."""
    path = tmp_path / "nodes"
    path.write_text("prefill a:1")
    async with watched(NodesFile(path, INTERVAL_S)) as reports:
        assert await comes(reports, 1) == {"a:1": "prefill"}
        for broken in (lambda: path.write_text("prefill a"), path.unlink):
            caplog.clear()
            broken()
            await _until(lambda: "its last nodes stay" in caplog.text)
        (tmp_path / "other").write_text("prefill a:1\ndecode b:1")
        path.symlink_to(tmp_path / "other")
        assert await comes(reports, 2) == {"a:1": "prefill", "b:1": "decode"}


@pytest.mark.parametrize("text", [None, "nonsense"])
def test_file_that_is_bad_at_start_is_refused(tmp_path: Path, text: str | None) -> None:
    """By the flag: a mistyped path is no cluster that comes later."""
    if text is not None:
        (tmp_path / "nodes").write_text(text)
    with pytest.raises(ConfigError, match="--nodes-file"):
        NodesFile(tmp_path / "nodes", INTERVAL_S)


class Resolver:
    """The system's resolver, as a test wants it."""

    def __init__(self, **answers: Sequence[str]) -> None:
        self.answers = answers

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        if host not in self.answers:
            raise OSError(f"{host} is not known")
        return self.answers[host]


async def test_each_address_of_a_name_is_a_node(caplog: pytest.LogCaptureFixture) -> None:
    """Asked for again and again; another order is no change."""
    resolver = Resolver(one=["10.0.0.1"], two=["10.0.0.2", "fd00::1"])
    async with watched(Names("decode", ["one:5", "two:6"], INTERVAL_S, resolver)) as reports:
        first = {"10.0.0.1:5": "decode", "10.0.0.2:6": "decode", "[fd00::1]:6": "decode"}
        assert await comes(reports, 1) == first
        resolver.answers["two"] = ["fd00::1", "10.0.0.2"]
        await asyncio.sleep(3 * INTERVAL_S)
        assert len(reports) == 1
        resolver.answers["two"] = ["10.0.0.3"]
        assert await comes(reports, 2) == {"10.0.0.1:5": "decode", "10.0.0.3:6": "decode"}


async def test_name_without_an_address_keeps_its_nodes(caplog: pytest.LogCaptureFixture) -> None:
    """A name server that fails must not empty a cluster that works; the other names go on."""
    resolver = Resolver(one=["10.0.0.1"], two=["10.0.0.2"])
    async with watched(Names("decode", ["one:5", "two:5"], INTERVAL_S, resolver)) as reports:
        await comes(reports, 1)
        del resolver.answers["one"]
        await _until(lambda: "one is not known; the nodes it had stay" in caplog.text)
        resolver.answers["one"] = []
        await _until(lambda: "it has no address" in caplog.text)
        resolver.answers["two"] = ["10.0.0.3"]
        assert await comes(reports, 2) == {"10.0.0.1:5": "decode", "10.0.0.3:5": "decode"}


async def test_system_resolver() -> None:
    """The one that the service uses: of a host with both families the IPv4 address is taken."""
    assert await dns.system_resolve("localhost", 5) == ["127.0.0.1"]
    assert await dns.system_resolve("::1", 5) == ["::1"]
    with pytest.raises(OSError):
        await dns.system_resolve("no-such-host.invalid", 5)


@pytest.mark.parametrize(
    "flags",
    [
        ["--prefill-dns", "p.example:1", "--decode", "d:1"],
        ["--nodes-file", "/nodes"],
        ["--prefill-k8s", "app=prefill", "--decode-k8s", "app=decode"],
    ],
)
def test_each_role_needs_a_source(flags: list[str]) -> None:
    """Whichever; without one the flag is named with what could be given."""
    ProxyConfig.load(flags, "lockstep proxy", "")
    with pytest.raises(ConfigError, match="--prefill: nothing says where the prefill nodes are"):
        ProxyConfig.load(["--decode-dns", "d:1"], "lockstep proxy", "")


@pytest.mark.parametrize("flag", ["--prefill-dns", "--decode-dns"])
def test_bad_name_is_refused_by_flag(flag: str) -> None:
    """A name needs a port."""
    with pytest.raises(ConfigError, match=flag):
        ProxyConfig.load(["--prefill", "p:1", "--decode", "d:1", flag, "name"], "lockstep proxy", "")


def test_one_address_in_both_roles_is_refused() -> None:
    """A node has one role."""
    with pytest.raises(ConfigError, match="a:1 is listed under --prefill too"):
        ProxyConfig.load(["--prefill", "a:1", "--decode", "a:1"], "lockstep proxy", "")


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - sources and the log have no event to wait for
            await asyncio.sleep(0.005)
