"""Finished prompts that decode has not taken hold at most a part of a prefill rank's pool."""

import pytest
from unit.proxy.world_for_tests import World

from lockstep.bounce import Bounce
from proxy.routing import RankLoad, held_limit_tokens

LIMIT_TOKENS = 2
"""Each prompt of the world has one token, so two of them are held on each of its two prefill nodes."""


def new_world(*, hand_off: bool) -> World:
    world = World(hand_off=hand_off)
    for load in prefill_loads(world):
        load.window_tokens, load.held_limit_tokens = 100, LIMIT_TOKENS
    return world


def prefill_loads(world: World) -> list[RankLoad]:
    return [world.flow.ranks.of(address)[0] for address in ("p1", "p2")]


def compute_all(world: World) -> None:
    for address in ("p1", "p2"):
        for leg in list(world.legs[address].values()):
            world.prefilled(leg)
    world.deliver()


@pytest.mark.parametrize("hand_off", [True, False])
async def test_requests_queue_here_while_decode_leaves_its_kv_on_prefill(hand_off: bool) -> None:
    """The rest of the pool is for prompts that decode has its own blocks for; what arrives makes room."""
    world = new_world(hand_off=hand_off)
    for _ in range(4):
        world.start()
    compute_all(world)
    assert [load.held_tokens for load in prefill_loads(world)] == [2, 2]
    world.start()
    assert world.flow.num_queued == 1
    leg = next(iter(world.legs["d1"].values()))
    world.decoded(leg, 1)
    assert world.flow.num_queued == 0
    assert sum(load.held_tokens for load in prefill_loads(world)) == 3


@pytest.mark.parametrize("way", ["bounce", "client", "node"])
async def test_what_is_held_for_nobody_makes_room(way: str) -> None:
    """The attempt ended before its KV arrived: on decode, by the client, or with the decode node."""
    world = new_world(hand_off=True)
    for _ in range(2):
        world.start()
    compute_all(world)
    assert sum(load.held_tokens for load in prefill_loads(world)) == 2
    if way == "bounce":
        for address in ("d1", "d2"):
            for leg in list(world.legs[address].values()):
                world.bounce(leg, Bounce.REVOKED)
    elif way == "client":
        for choice in range(2):
            world.client_leaves(choice)
    else:
        world.node_down("d1")
        world.node_down("d2")
    assert [load.held_tokens for load in prefill_loads(world)] == [0, 0]


def test_half_of_the_pool_may_be_held() -> None:
    """Of a node that does not say how large its pool is, any part."""
    assert held_limit_tokens(num_kv_blocks=100, block_size=16) == 800
    assert held_limit_tokens(num_kv_blocks=0, block_size=16) is None
