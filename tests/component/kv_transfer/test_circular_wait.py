"""Two full KV pools that wait for each other, between real connectors."""

import random
from contextlib import closing

import pytest
from component.kv_transfer.engines import BLOCK_SIZE, Pair

pytestmark = pytest.mark.usefixtures("world")

ROOM_BLOCKS = 12
"""A pool that one prompt of 8 blocks fills so far that another one does not fit."""
FIRST, SECOND = "ls-1-0-a1", "ls-2-0-a1"


def new_prompt() -> list[int]:
    return random.sample(range(10, 9000), 8 * BLOCK_SIZE)


def test_full_pools_that_wait_for_each_other_go_on() -> None:
    """Decode's blocks are reserved for a prompt that prefill has no room to compute, and prefill's hold one
    that decode has no room for. Decode takes its blocks back from the first, which ends, for the second."""
    with closing(Pair(ROOM_BLOCKS, {"lockstep_stall_patience_s": 0.2})) as pair:
        first, second = new_prompt(), new_prompt()
        pair.add_decode(FIRST, first)
        pair.decode.step()
        finished = pair.add_decode(SECOND, second)
        pair.add_prefill(SECOND, second)
        pair.until(lambda: bool(pair.prefill.counters["leases_held"]))
        pair.add_prefill(FIRST, first)
        before = pair.decode.received
        pair.until(lambda: pair.decode.received > before, deadline_s=5)
        assert pair.decode.holds_kv_of(finished)
        assert pair.decode.failed == {FIRST}
        assert pair.decode.counters["failed"] == {"revoked": 1}
        assert pair.decode.counters["questions_sent"] >= 2
        pair.prefill.abort(FIRST)  # as the proxy does when it begins a new attempt
        pair.until(lambda: pair.idle)


def test_reservation_whose_prompt_is_being_computed_is_kept() -> None:
    """Decode stands still and asks, but prefill has begun: nothing is lost, and both are served."""
    with closing(Pair(ROOM_BLOCKS, {"lockstep_stall_patience_s": 0.05})) as pair:
        first, second = new_prompt(), new_prompt()
        request = pair.add_decode(FIRST, first)
        pair.decode.step()
        pair.add_decode(SECOND, second)
        pair.add_prefill(FIRST, first)
        pair.prefill.step()
        pair.wait(lambda: pair.prefill.counters["streamed_chunks"] == 1)

        def asked() -> bool:
            pair.decode.step()
            return bool(pair.decode.counters["questions_sent"] >= 4)

        pair.wait(asked)
        pair.add_prefill(SECOND, second)
        pair.until(lambda: pair.decode.received == 1)
        assert pair.decode.holds_kv_of(request)
        pair.until(lambda: pair.decode.received == 2)
        assert pair.decode.failed == set()
        pair.until(lambda: pair.idle)
