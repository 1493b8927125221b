"""A node's gRPC port with a token and with TLS: who gets in, and what those who do not are told."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest
from certificates import Authority
from component.node.test_server import DEADLINE_S, HELLO, ROLE, State
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from lockstep.health import bind
from lockstep.node.config import NodeConfig
from lockstep.node.server import NodeService, start_server
from lockstep.node.sessions import SessionRegistry
from lockstep.rpc.channel import connect
from lockstep.rpc.credentials import NO_CREDENTIALS, Credentials, of_caller, of_node
from lockstep.rpc.generated import lockstep_pb2 as pb
from lockstep.rpc.generated.lockstep_pb2_grpc import NodeStub
from proxy.config import ProxyConfig

TOKEN = Credentials(tokens=("0123456789abcdef-new", "0123456789abcdef-old"))
OLD_TOKEN = Credentials(tokens=("0123456789abcdef-old",))
WRONG_TOKEN = Credentials(tokens=("0123456789abcdef-bad",))

Serve = Callable[[Credentials], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Start a node's server with credentials; gives its address."""
    servers: list[grpc.aio.Server] = []

    async def begin(credentials: Credentials) -> str:
        with bind("127.0.0.1", 0, "--port") as free:
            port = free.getsockname()[1]
        service = NodeService(ROLE, State(), SessionRegistry())
        server, _ = await start_server(service, "127.0.0.1", port, credentials)
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield begin
    for server in servers:
        await server.stop(grace=0)


async def instance_id(address: str, credentials: Credentials) -> str:
    """What Describe says, and a session is greeted with; raises AioRpcError for a caller that is refused."""
    async with connect(address, credentials) as channel:
        stub = NodeStub(channel)
        described = await stub.Describe(
            pb.DescribeRequest(), timeout=DEADLINE_S, metadata=credentials.metadata
        )
        call = stub.Session(timeout=DEADLINE_S, metadata=credentials.metadata)
        await call.write(HELLO)
        welcomed = await call.read()
        call.cancel()
    assert welcomed.welcome.instance_id == described.instance_id
    return str(described.instance_id)


@pytest.mark.parametrize("shown", [TOKEN, OLD_TOKEN])
async def test_each_token_of_the_node_lets_a_proxy_in(serve: Serve, shown: Credentials) -> None:
    assert await instance_id(await serve(TOKEN), shown) == "i1"


@pytest.mark.parametrize("shown", [NO_CREDENTIALS, WRONG_TOKEN])
async def test_without_the_token_no_method_answers(serve: Serve, shown: Credentials) -> None:
    """Neither a call nor a session, and the refusal comes before the node has read a frame."""
    async with connect(await serve(TOKEN), shown) as channel:
        stub = NodeStub(channel)
        calls = (
            stub.Describe(pb.DescribeRequest(), timeout=DEADLINE_S, metadata=shown.metadata),
            stub.Status(pb.StatusRequest(), timeout=DEADLINE_S, metadata=shown.metadata),
            stub.Session(timeout=DEADLINE_S, metadata=shown.metadata).read(),
        )
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_needs_no_token(serve: Serve) -> None:
    """An orchestrator's probe shows none."""
    async with connect(await serve(TOKEN)) as channel:
        answer = await HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def tls(authority: Authority, name: str) -> dict[str, str]:
    cert, key = authority.issue(name)
    return {
        "grpc_tls_cert_file": str(cert),
        "grpc_tls_key_file": str(key),
        "grpc_tls_ca_file": str(authority.ca_file),
    }


def of_a_proxy(**fields: str) -> Credentials:
    return of_caller(ProxyConfig(prefill="h:1", decode="h:2", **fields))


async def test_certificates_of_one_authority_connect_both_ends(serve: Serve, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    address = await serve(of_node(NodeConfig(**tls(authority, "127.0.0.1"))))
    assert await instance_id(address, of_a_proxy(**tls(authority, "proxy"))) == "i1"


async def test_a_proxy_without_a_certificate_of_the_authority_is_refused(
    serve: Serve, tmp_path: Path
) -> None:
    """It knows the node by its certificate, but the node knows neither it nor one that another signed."""
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    address = await serve(of_node(NodeConfig(**tls(authority, "127.0.0.1"))))
    none = of_a_proxy(grpc_tls_ca_file=str(authority.ca_file))
    strange = of_a_proxy(**{**tls(stranger, "proxy"), "grpc_tls_ca_file": str(authority.ca_file)})
    for credentials in (none, strange, NO_CREDENTIALS):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await instance_id(address, credentials)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_node_with_another_name_or_authority_is_not_trusted(serve: Serve, tmp_path: Path) -> None:
    """Otherwise whoever takes over an address gets the prompts; one name for all nodes can be given."""
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    address = await serve(of_node(NodeConfig(**tls(authority, "nodes.internal"))))
    proxy = of_a_proxy(**tls(authority, "proxy"))
    other_ca = of_a_proxy(**{**tls(authority, "proxy"), "grpc_tls_ca_file": str(stranger.ca_file)})
    for credentials in (proxy, other_ca):
        with pytest.raises(grpc.aio.AioRpcError):
            await instance_id(address, credentials)
    assert await instance_id(address, replace(proxy, server_name="nodes.internal")) == "i1"


async def test_tls_and_token_together(serve: Serve, tmp_path: Path) -> None:
    """The node's certificate keeps the token secret; the token says who calls."""
    authority = Authority(tmp_path)
    cert, key = authority.issue("127.0.0.1")
    config = NodeConfig(grpc_tls_cert_file=str(cert), grpc_tls_key_file=str(key))
    address = await serve(replace(of_node(config), tokens=TOKEN.tokens))
    trusting = of_a_proxy(grpc_tls_ca_file=str(authority.ca_file))
    assert await instance_id(address, replace(trusting, tokens=OLD_TOKEN.tokens)) == "i1"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await instance_id(address, trusting)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
