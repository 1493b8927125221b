"""A cluster that is upgraded under a running proxy: to another key, and to another model."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

from component.proxy.conftest import Start
from component.proxy.fake_legs import Leg
from component.proxy.fake_node import FakeNode, Wire
from component.proxy.stack import PICO, Stack, until

ASK: dict[str, Any] = {"model": "pico", "prompt": "Some words, and some more of them.", "max_tokens": 8}


async def ask(stack: Stack) -> int:
    return (await stack.http.post("/v1/completions", json=ASK)).status_code


async def test_one_node_after_the_other_is_upgraded(start: Start) -> None:
    """To another connector: each of them takes requests as soon as it has a peer, with peers of its kind."""
    wire = Wire()
    prefill = [FakeNode("prefill", wire, PICO) for _ in range(2)]
    decode = [FakeNode("decode", wire, PICO) for _ in range(2)]
    stack = await start(prefill=prefill, decode=decode)
    await until(
        lambda: len(stack.cluster.live("prefill")) == len(stack.cluster.live("decode")) == 2, "all up"
    )
    old_legs: dict[str, int] = {}
    for node in (prefill[0], decode[0], prefill[1], decode[1]):
        old_legs[node.address] = len(node.legs)
        before = stack.cluster.known(node.role)
        await node.stop()
        node.described["connector_version"] = "2"
        await node.start()
        await until(lambda before=before, node=node: _again(stack, node, before), "it is back")
        for _ in range(4):
            assert await ask(stack) == 200
    assert stack.cluster.not_ready_because() == ""
    for node in decode:
        number = old_legs[node.address]
        assert {_prefill(leg) for leg in node.legs[:number]} <= {"prefill-1_dp0"}
        assert {_prefill(leg) for leg in node.legs[number:]} == {"prefill-2_dp0"}


def _prefill(leg: Leg) -> str:
    """The engine id of a decode leg's prefill rank, with the number of its node's start."""
    assert leg.request.sampling_params is not None
    engine_id: str = (leg.request.sampling_params.extra_args or {})["kv_transfer_params"]["remote_engine_id"]
    return engine_id


def _again(stack: Stack, node: FakeNode, before: list[Any]) -> bool:
    known = {n.address: n.instance_id for n in stack.cluster.known(node.role)}
    old = {n.address: n.instance_id for n in before}
    return known[node.address] != old[node.address] and stack.cluster.pair() is not None


async def test_upgrade_in_place_of_the_only_pair(start: Start) -> None:
    """What needed a restart of the proxy once: both nodes come back with another key."""
    wire = Wire()
    prefill, decode = FakeNode("prefill", wire, PICO), FakeNode("decode", wire, PICO)
    stack = await start(prefill=[prefill], decode=[decode])
    for node in (prefill, decode):
        await node.stop()
        node.described["block_size"] = 32
        await node.start()
    await until(lambda: _block_size(stack) == 32, "the new pair is used")
    assert await ask(stack) == 200


def _block_size(stack: Stack) -> int | None:
    pair = stack.cluster.pair()
    return pair[1].key.block_size if pair else None


async def test_another_model_takes_over(start: Start, tmp_path: Path) -> None:
    """When no pair of the old one is left: clients see the new model's files and limit, under the same name.

    A stream of the old model that still runs then is ended by the old front end, whole.
    """
    wire, model = Wire(), tmp_path / "pico-2"
    shutil.copytree(PICO, model)
    old = FakeNode("prefill", wire, PICO), FakeNode("decode", wire, PICO)
    new = [FakeNode(role, wire, str(model), served_context_limit=99) for role in ("prefill", "decode")]
    for node in new:
        node.set.ready = False
    stack = await start(prefill=[old[0], new[0]], decode=[old[1], new[1]])
    for node in new:
        node.set.ready = True
    await until(lambda: all(entry.node for entry in stack.cluster.listed()), "all are connected")
    assert await models(stack) == [(PICO, stack.front_end.model_config.max_model_len)]
    old[1].set.pause_after_tokens = 4
    stream = asyncio.create_task(ask(stack))
    await until(lambda: old[1].num_paused, "a stream of the old model runs")
    first = stack.front_end
    await old[0].stop()
    await until(lambda: stack.front_end is not first, "the new front end answers")
    assert stack.client.flow.not_ready_because() == ""
    assert await models(stack) == [(str(model), 99)]
    assert await ask(stack) == 200
    assert len(stack.front_ends.all()) == 2
    old[1].set.go.set()
    assert await stream == 200
    await until(lambda: len(stack.front_ends.all()) == 1, "the old front end is closed")
    assert len(new[1].legs) == 1
    assert "vllm:request_success_total{" in (await stack.http.get("/metrics")).text


async def models(stack: Stack) -> list[tuple[str, int]]:
    """Files and context limits, as clients see them."""
    data = (await stack.http.get("/v1/models")).json()["data"]
    return [(model["root"], model["max_model_len"]) for model in data]
