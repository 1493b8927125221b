"""Which nodes are used: compatibility, warming up, draining, restarts, readiness."""

import logging
from typing import Any, Literal

import pytest
from component.proxy.fake_node import FakeNode, Wire
from component.proxy.stack import PICO, Stack, until

from lockstep.errors import UnavailableError
from proxy import arguments, server

ASK: dict[str, Any] = {"model": "pico", "prompt": "Some words.", "max_tokens": 5}


async def test_ready_with_a_pair(stack: Stack) -> None:
    """/health is vLLM's, the other two are those of the nodes."""
    for path in ("/health", "/healthz", "/readyz"):
        assert (await stack.http.get(path)).status_code == 200


async def test_not_ready_without_a_pair(stack: Stack) -> None:
    """/readyz names the node and its state; liveness stays."""
    await stack.decode[0].stop()
    await until(lambda: stack.client.flow.not_ready_because(), "the proxy notices")
    answer = await stack.http.get("/readyz")
    assert answer.status_code == 503
    assert f"decode {stack.decode[0].address}: " in answer.json()["reason"]
    assert (await stack.http.get("/health")).status_code == 503
    assert (await stack.http.get("/healthz")).status_code == 200


async def test_node_that_restarts_is_used_again(stack: Stack) -> None:
    """Under its new engine id: the decode leg names the new prefill process."""
    assert (await stack.http.post("/v1/completions", json=ASK)).status_code == 200
    await stack.prefill[0].stop()
    await until(lambda: stack.client.flow.not_ready_because(), "the proxy notices")
    await stack.prefill[0].start()
    await until(lambda: not stack.client.flow.not_ready_because(), "the proxy is back")
    assert (await stack.http.post("/v1/completions", json=ASK)).status_code == 200
    engine_ids = [
        leg.request.sampling_params.extra_args["kv_transfer_params"]["remote_engine_id"]
        for leg in stack.decode[0].legs
    ]
    assert engine_ids == ["prefill-1_dp0", "prefill-2_dp0"]


async def test_node_that_fits_no_peer_is_refused_with_the_field(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """One line names the field and both values; the node gets no request, the others go on."""
    wire = Wire()
    odd = FakeNode("prefill", wire, PICO, kv_cache_dtype="fp8")
    good = FakeNode("prefill", wire, PICO)
    with _captured(caplog):
        stack = await start(prefill=[good, odd], decode=[FakeNode("decode", wire, PICO)])
        refused = f"prefill node {odd.address} is refused"
        await until(lambda: refused in caplog.text, "the odd one is refused")
    # Decode has a line of its own if it connects when only the odd one is there yet.
    (line,) = [r.getMessage() for r in caplog.records if refused in r.getMessage()]
    assert f"{refused}: kv_cache_dtype is 'fp8', but 'auto' on decode" in line
    for _ in range(3):
        assert (await stack.http.post("/v1/completions", json=ASK)).status_code == 200
    assert not odd.legs


async def test_start_without_a_pair_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """At the deadline the message names each node and what is wrong with it."""
    wire = Wire()
    prefill, decode = FakeNode("prefill", wire, PICO), FakeNode("decode", wire, PICO, block_size=32)
    for node in (prefill, decode):
        await node.start()
    config, _ = arguments.load(["--prefill", prefill.address, "--decode", decode.address])
    async with server.sessions(config) as (cluster, client):
        with pytest.raises(UnavailableError, match="block_size is 16, but 32 on decode node"):
            await server.first_pair(cluster, client.flow, 1.0)
    for node in (prefill, decode):
        await node.stop()


@pytest.mark.parametrize(
    ("role", "described", "reason"),
    [
        ("prefill", {"protocol_version": 99}, "it speaks protocol version 99"),
        ("prefill", {"ready": False}, "it is warming up"),
        ("prefill", {"vllm_version": "0.33.0"}, "it runs vLLM 0.33.0, this proxy 0.32"),
        ("decode", {}, "it is a decode node, but listed under --prefill"),
    ],
)
async def test_unusable_node_is_named_with_its_reason(
    role: Literal["prefill", "decode"], described: dict[str, Any], reason: str
) -> None:
    """Each is told apart in the reason for not being ready."""
    node = FakeNode(role, Wire(), PICO, **described)
    await node.start()
    config, _ = arguments.load(["--prefill", node.address, "--decode", "127.0.0.1:1"])
    async with server.sessions(config) as (_, client):
        await until(lambda: reason in client.flow.not_ready_because(), "the reason shows")
    await node.stop()


async def test_draining_node_gets_no_new_requests(stack: Stack) -> None:
    """It finishes what it has; with no other one the next request is refused."""
    stack.decode[0].drain()
    await until(lambda: "draining" in stack.client.flow.not_ready_because(), "the proxy is told")
    answer = await stack.http.post("/v1/completions", json=ASK)
    assert answer.status_code == 503
    assert not stack.decode[0].legs


def _captured(caplog: pytest.LogCaptureFixture) -> Any:
    logging.getLogger("proxy").propagate = True
    return caplog.at_level(logging.INFO, logger="proxy")
