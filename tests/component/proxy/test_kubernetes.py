"""Nodes from EndpointSlices: what is listed and watched, and what the API server refuses or forgets."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from component.proxy.fake_kubernetes import NAMESPACE, TOKEN, FakeKubernetes, endpoint_slice
from component.proxy.fake_node import FakeNode, Wire
from component.proxy.stack import PICO, until
from unit.proxy import sources_for_tests

from lockstep.errors import ConfigError
from proxy import arguments, server
from proxy.discovery.endpoint_slices import EndpointSlices
from proxy.discovery.kubernetes_api import Access
from proxy.discovery.source import Nodes

captured = pytest.fixture(autouse=True)(sources_for_tests.proxy_log)


@pytest.fixture
async def api() -> AsyncIterator[FakeKubernetes]:
    fake = await FakeKubernetes().start()
    yield fake
    await fake.stop()


@pytest.fixture
def credentials(tmp_path: Path) -> Path:
    """As Kubernetes mounts them; the CA is not needed for plain HTTP."""
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "namespace").write_text(NAMESPACE)
    return tmp_path


def watched(
    api: FakeKubernetes, credentials: Path, selector: str = "component=decode", namespace: str = ""
) -> AbstractAsyncContextManager[list[Nodes]]:
    """What the source reports."""
    access = Access.of_pod(api.url, credentials, namespace)
    return sources_for_tests.watched(EndpointSlices("decode", selector, "grpc", access))


def decode(*addresses: str) -> Nodes:
    return dict.fromkeys(addresses, "decode")


async def test_endpoints_come_and_go(api: FakeKubernetes, credentials: Path) -> None:
    """Those of the labels asked for, over several pages of the list; later changes come by one watch."""
    for number in range(5):
        api.put(endpoint_slice(f"d-{number}", "decode", f"10.0.0.{number}", port=50051))
    api.put(endpoint_slice("p", "prefill", "10.0.1.1", port=50051))
    async with watched(api, credentials) as reports:
        five = decode(*(f"10.0.0.{number}:50051" for number in range(5)))
        await until(lambda: reports == [five], "all pages are read")
        await until(lambda: api.watches == 1, "it watches")
        api.delete("d-0")
        api.put(endpoint_slice("d-1", "decode", "10.0.0.1", "10.0.0.9", port=50051))
        api.put(endpoint_slice("p", "prefill", port=50051))
        changed = {address: "decode" for address in five if address != "10.0.0.0:50051"}
        await until(lambda: reports[-1] == changed | {"10.0.0.9:50051": "decode"}, "changes come")
    assert (api.lists, api.watches, api.refused) == (3, 1, [])


@pytest.mark.parametrize("as_event", [True, False])
async def test_version_that_is_forgotten_is_listed_anew(
    api: FakeKubernetes, credentials: Path, as_event: bool
) -> None:
    """410 Gone, as an answer or as an event: nothing that happened meanwhile is lost."""
    api.gone_as_event = as_event
    api.put(endpoint_slice("d", "decode", "10.0.0.1", port=5))
    async with watched(api, credentials) as reports:
        await until(lambda: api.watches == 1, "it watches")
        api.put(endpoint_slice("d", "decode", "10.0.0.2", port=5))
        api.forget()
        await until(lambda: reports[-1:] == [decode("10.0.0.2:5")], "the change is seen")
        assert api.lists == 2
        api.put(endpoint_slice("d", "decode", "10.0.0.3", port=5))
        await until(lambda: reports[-1] == decode("10.0.0.3:5"), "later changes are seen too")


async def test_api_server_that_is_away(
    api: FakeKubernetes, credentials: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last nodes stay; when it is back they are listed anew."""
    api.put(endpoint_slice("d", "decode", "10.0.0.1", port=5))
    async with watched(api, credentials) as reports:
        await until(lambda: api.watches == 1, "it watches")
        await api.stop()
        await until(lambda: "the last nodes stay" in caplog.text, "it complains")
        assert reports == [decode("10.0.0.1:5")]
        api.put(endpoint_slice("d", "decode", "10.0.0.2", port=5))
        await api.start()
        await until(lambda: reports[-1] == decode("10.0.0.2:5"), "it is seen")


async def test_token_is_rotated(api: FakeKubernetes, credentials: Path) -> None:
    """The kubelet replaces the file; the old token is refused then."""
    async with watched(api, credentials) as reports:
        await until(lambda: api.watches == 1, "it watches")
        api.token = "another-token"
        api.forget()
        await until(lambda: 401 in api.refused, "the old one is refused")
        (credentials / "token").write_text(api.token)
        api.put(endpoint_slice("d", "decode", "10.0.0.1", port=5))
        await until(lambda: reports[-1] == decode("10.0.0.1:5"), "the new one is used")


@pytest.mark.parametrize(
    ("selector", "namespace", "complaint"),
    [
        ("component=decode", "other", '403: endpointslices.discovery.k8s.io is forbidden: User "proxy"'),
        ("component in(", "", "400: unable to parse requirement"),
    ],
)
async def test_refusal_is_said_once(
    api: FakeKubernetes,
    credentials: Path,
    caplog: pytest.LogCaptureFixture,
    selector: str,
    namespace: str,
    complaint: str,
) -> None:
    """With the API server's own words: a role that is missing is a thing for people."""
    async with watched(api, credentials, selector, namespace) as reports:
        await until(lambda: len(api.refused) >= 2, "it tries again")
    assert caplog.text.count(complaint) == 1
    assert reports == []


async def test_dual_stack_and_other_ports(api: FakeKubernetes, credentials: Path) -> None:
    """A pod with an address of each family is one node; a port of another name is none."""
    api.put(endpoint_slice("d-4", "decode", "10.0.0.1", port=5))
    api.put(endpoint_slice("d-6", "decode", "fd00::1", port=5, family="IPv6"))
    api.put(endpoint_slice("d-x", "decode", "10.0.0.7", port=5, port_name="metrics"))
    api.put(endpoint_slice("d-n", "decode", "name.example", port=5, family="FQDN"))
    async with watched(api, credentials) as reports:
        await until(lambda: reports == [decode("10.0.0.1:5")], "IPv4 is taken")
        api.delete("d-4")
        await until(lambda: reports[-1] == decode("[fd00::1]:5"), "IPv6 where there is nothing else")


async def test_proxy_finds_its_nodes(api: FakeKubernetes, credentials: Path) -> None:
    """By the flags, to a session with each node; a pod that is replaced is found under its new address."""
    wire = Wire()
    prefill, old, new = (FakeNode(role, wire, PICO) for role in ("prefill", "decode", "decode"))
    for node in (prefill, old, new):
        await node.start()
    flags = ["--prefill-k8s", "component=prefill", "--decode-k8s", "component=decode"]
    flags += ["--k8s-api-url", api.url, "--k8s-credentials-dir", str(credentials)]
    api.put(endpoint_slice("p", "prefill", "127.0.0.1", port=prefill.port))
    api.put(endpoint_slice("d", "decode", "127.0.0.1", port=old.port))
    config, _ = arguments.load(flags)
    async with server.sessions(config) as (cluster, client):
        await until(lambda: not client.flow.not_ready_because(), "the pair is found")
        api.put(endpoint_slice("d", "decode", "127.0.0.1", port=new.port))
        await until(lambda: [n.address for n in cluster.live("decode")] == [new.address], "it moves on")
        await until(lambda: not old.sessions, "the old session is closed")
    for node in (prefill, old, new):
        await node.stop()


@pytest.mark.parametrize(
    ("namespace", "ca", "flag"),
    [(False, None, "--k8s-namespace"), (True, "no certificate", "--k8s-credentials-dir")],
)
def test_what_a_pod_does_not_give(tmp_path: Path, namespace: bool, ca: str | None, flag: str) -> None:
    """Refused at the start, by the flag that can be given instead."""
    if namespace:
        (tmp_path / "namespace").write_text(NAMESPACE)
    if ca is not None:
        (tmp_path / "ca.crt").write_text(ca)
    with pytest.raises(ConfigError, match=flag):
        Access.of_pod("https://api.example", tmp_path, "")


def test_api_server_of_the_pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From the environment that Kubernetes gives every pod."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="--k8s-api-url"):
        Access.of_pod("", tmp_path, "ns")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert Access.of_pod("", tmp_path, "ns").url == "https://[fd00::1]:443"
