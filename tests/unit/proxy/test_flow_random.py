"""Flow under any order of events: no token lost or twice, one end for each choice, no load left."""

import asyncio
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from unit.proxy.world_for_tests import ADDRESSES, MAX_ATTEMPTS, Leg, World
from vllm.v1.engine import FinishReason

from lockstep.bounce import Bounce
from lockstep.errors import DrainingError, InvalidRequestError, NodeLostError, UnavailableError
from proxy.attempt import Phase

Event = Callable[[], None]

MOST_CHOICES = 6
BOUNCES = (Bounce.PREEMPTED, Bounce.KV_LOAD_FAILED, Bounce.LOCAL_PREFILL)
ERRORS = (UnavailableError("x"), DrainingError("x"), NodeLostError("x"), InvalidRequestError("x"))


def prefill_events(world: World, leg: Leg) -> list[Event]:
    return [
        *[lambda: world.prefilled(leg)] * 6,
        *[lambda: world.pushed.add(leg.leg_id)] * 3,  # decode may then be heard of first
        *[lambda: world.sampled(leg)] * 3 * leg.hand_off,
        lambda: world.output(leg, [], FinishReason.ERROR),
        lambda: world.output(leg, [], FinishReason.ABORT),
        *(lambda error=error: world.refuse(leg, error) for error in ERRORS),
    ]


def decode_events(world: World, leg: Leg) -> list[Event]:
    events: list[Event] = [lambda bounce=bounce: world.bounce(leg, bounce) for bounce in BOUNCES]
    if leg.leg_id in world.pushed:
        events += [lambda most=most: world.decoded(leg, most) for most in (1, 2, 3, 1, 2, 3)]
    if not leg.sent:
        events += [lambda: world.output(leg, [], FinishReason.ERROR)]
        events += [lambda error=error: world.refuse(leg, error) for error in ERRORS]
    return events


def possible(world: World) -> list[Event]:
    """All that can happen now, by role; what happens often in life is in it more than once."""
    events: list[Event] = []
    if len(world.received) < MOST_CHOICES:
        events += [world.start] * 3
    for address, role in ADDRESSES.items():
        if address in world.up:
            events.append(lambda address=address: world.node_down(address))
            events += [
                lambda address=address, move=move: world.drain(address, move) for move in (True, False)
            ]
        else:
            events += [lambda address=address: world.node_up(address)] * 2
        for leg in list(world.legs[address].values()):
            events += prefill_events(world, leg) if role == "prefill" else decode_events(world, leg)
    for flight in world.flow.in_flight():
        is_waited_for = flight.attempt is not None and flight.attempt.phase is Phase.DISPATCHED
        if is_waited_for and flight.hedge is None and len(flight.attempts) < MAX_ATTEMPTS:
            events.append(lambda flight=flight: world.hedge(flight))
    for leg in world.dead[-3:]:
        events.append(lambda leg=leg: world.output(leg, [9999]))
        events.append(lambda leg=leg: world.output(leg, [9999], FinishReason.STOP))
    left = [choice for choice, ends in enumerate(world.ends) if not ends]
    events += [lambda choice=choice: world.client_leaves(choice) for choice in left[-1:]]
    return events


def run_to_the_end(world: World) -> None:
    """Every node is there and does its work; whatever is left then would be left for good."""
    for address in list(world.draining):
        world.node_down(address)
    for address in set(ADDRESSES) - world.up:
        world.node_up(address)
    for _ in range(100):
        world.check()
        legs = [leg for address in ADDRESSES for leg in world.legs[address].values()]
        if not legs:
            break
        for leg in legs:
            if ADDRESSES[leg.address] == "prefill":
                world.prefilled(leg)
            elif leg.leg_id in world.pushed:
                world.decoded(leg, 3)
    world.check()


@given(st.lists(st.integers(0, 10**6), min_size=40, max_size=80), st.booleans())
@settings(max_examples=120, deadline=None)
def test_any_order_of_events(picks: list[int], hand_off: bool) -> None:
    """Whatever happens to nodes, legs and clients, in whatever order."""

    async def play() -> None:
        world = World(hand_off)
        for pick in picks:
            events = possible(world)
            events[pick % len(events)]()
            world.check()
        run_to_the_end(world)
        assert all(len(ends) == 1 for ends in world.ends)
        assert world.flow.num_in_flight == world.flow.num_queued == 0

    asyncio.run(play())
