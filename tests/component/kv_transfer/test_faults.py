"""Each step of the protocol between real connectors fails, is lost, comes late or comes twice.

In every case both sides have all of their blocks back in the end, and the next request is served
(docs/faults.md).
"""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
from component.kv_transfer.engines import BLOCK_SIZE, Engine, Pair, free_port
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import PUSH_REG_NOTIF_PREFIX
from vllm.v1.request import Request

from kv_transfer.notices import NOTICE_PREFIX, Cancel, Completed, Released, decode_notice
from kv_transfer.params import PrefillPeer, decode_leg_params, prefill_leg_params

pytestmark = pytest.mark.usefixtures("world")

DEADLINE_S = 2.0
OPTIONS = {"lockstep_registration_deadline_s": DEADLINE_S, "lockstep_cancel_ack_timeout_s": 0.3}
_ids = (f"ls-{number}-0-a1" for number in itertools.count())


@pytest.fixture(scope="module")
def shared_pair(world: None) -> Iterator[Pair]:
    with closing(Pair(40, OPTIONS)) as pair:
        yield pair


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    """Idle before and after the test, and then fit to serve."""
    yield shared_pair
    shared_pair.until(lambda: shared_pair.idle, deadline_s=10)
    before = shared_pair.decode.received
    request = start(shared_pair)
    shared_pair.until(lambda: shared_pair.decode.received > before)
    assert shared_pair.decode.holds_kv_of(request)
    shared_pair.until(lambda: shared_pair.idle)


def start(pair: Pair, *, peer: PrefillPeer | None = None) -> Request:
    """Both legs of a new request; returns decode's."""
    prompt, request_id = random.sample(range(10, 9000), 3 * BLOCK_SIZE), next(_ids)
    params = decode_leg_params(peer or pair.prefill.peer, request_id, pair.token)
    request = pair.decode.add(request_id, prompt, params)
    pair.decode.step()
    pair.prefill.add(request_id, prompt, prefill_leg_params(pair.token))
    return request


def fails(pair: Pair, request: Request, reason: str, deadline_s: float) -> None:
    """Within the deadline, and counted under this name; then the other leg is ended, as the proxy does."""
    before = pair.decode.counters["failed"].get(reason, 0)
    pair.until(lambda: request.request_id in pair.decode.failed, deadline_s)
    assert pair.decode.counters["failed"].get(reason, 0) >= max(before, 1)
    pair.prefill.abort(request.request_id)
    connector: Any = pair.prefill.scheduler.connector
    connector.abandon(request.request_id)


Matches = Callable[[bytes], bool]


def registration(data: bytes) -> bool:
    return data.startswith(PUSH_REG_NOTIF_PREFIX)


def notice(kind: type) -> Matches:
    return lambda data: data.startswith(NOTICE_PREFIX) and isinstance(decode_notice(data), kind)


@dataclass
class Wire:
    """What one engine's NIXL does with the first notification of a kind."""

    engine: Engine
    matches: Matches
    caught: list[tuple[str, bytes]]
    send: Callable[..., None]

    def deliver(self) -> None:
        for agent, data in self.caught:
            self.send(agent, notif_msg=data)


@contextmanager
def first_is(fate: str, engine: Engine, matches: Matches) -> Iterator[Wire]:
    """It is "lost", "doubled" or "refused"; those after it arrive."""
    worker: Any = engine.workers[0].connector_worker
    wire = Wire(engine, matches, [], worker.nixl_wrapper.send_notif)

    def send(agent: str, notif_msg: bytes) -> None:
        if wire.caught or not matches(notif_msg):
            wire.send(agent, notif_msg=notif_msg)
            return
        wire.caught.append((agent, notif_msg))
        if fate == "refused":
            raise RuntimeError("NIXL_ERR_BACKEND")
        for _ in range({"lost": 0, "doubled": 2}[fate]):
            wire.send(agent, notif_msg=notif_msg)

    with mock.patch.object(worker.nixl_wrapper, "send_notif", side_effect=send):
        yield wire


def test_registration_that_is_lost_ends_at_the_deadline(pair: Pair) -> None:
    """Prefill never hears of it; decode's cancel ends both sides."""
    with first_is("lost", pair.decode, registration):
        fails(pair, start(pair), "deadline", 2 * DEADLINE_S)


def test_registration_that_nixl_refuses_fails_at_once(pair: Pair) -> None:
    """It may have got through all the same, so prefill is asked not to write."""
    with first_is("refused", pair.decode, registration):
        fails(pair, start(pair), "registration_failed", DEADLINE_S / 2)


def test_registration_that_comes_twice_is_pushed_once(pair: Pair) -> None:
    """The second one is a repeat."""
    before, pushed = pair.decode.received, pair.prefill.counters["pushed_requests"]
    with first_is("doubled", pair.decode, registration):
        request = start(pair)
        pair.until(lambda: pair.decode.received > before, DEADLINE_S)
    assert pair.decode.holds_kv_of(request)
    assert pair.prefill.counters["pushed_requests"] == pushed + 1


def test_completion_that_is_lost_ends_at_the_deadline(pair: Pair) -> None:
    """The KV is there and nobody knows; the attempt ends and the fence opens."""
    with first_is("lost", pair.prefill, notice(Completed)):
        fails(pair, start(pair), "deadline", 2 * DEADLINE_S)


def test_completion_that_comes_twice_counts_once(pair: Pair) -> None:
    """The second one is late."""
    before, late = pair.decode.received, pair.decode.counters["late_notices"]
    with first_is("doubled", pair.prefill, notice(Completed)):
        request = start(pair)
        pair.until(lambda: pair.decode.received > before, DEADLINE_S)
        assert pair.decode.holds_kv_of(request)
        pair.until(lambda: pair.decode.counters["late_notices"] == late + 1)
    assert pair.decode.received == before + 1


def test_completion_after_the_end_changes_nothing(pair: Pair) -> None:
    """Its request has failed and its blocks may be another's."""
    late = pair.decode.counters["late_notices"]
    with first_is("lost", pair.prefill, notice(Completed)) as wire:
        fails(pair, start(pair), "deadline", 2 * DEADLINE_S)
        pair.until(lambda: pair.idle)
        wire.deliver()
        pair.until(lambda: pair.decode.counters["late_notices"] == late + 1)
    assert pair.idle


@pytest.mark.parametrize(
    ("side", "kind"), [("decode", Cancel), ("prefill", Released)], ids=["the cancel", "its answer"]
)
def test_cancel_is_repeated_until_it_is_answered(pair: Pair, side: str, kind: type) -> None:
    """Either of the two is lost; meanwhile the blocks are in quarantine."""
    prompt, request_id = random.sample(range(10, 9000), 3 * BLOCK_SIZE), next(_ids)
    pair.decode.add(request_id, prompt, decode_leg_params(pair.prefill.peer, request_id, pair.token))
    pair.decode.step()
    pair.wait(lambda: pair.prefill.outstanding)
    with first_is("lost", getattr(pair, side), notice(kind)):
        pair.decode.abort(request_id)
        began = time.monotonic()
        pair.until(lambda: pair.decode.kv_usage == 0)
    assert 0.3 <= time.monotonic() - began < DEADLINE_S
    assert pair.decode.counters["quarantined_blocks"] == 0


@pytest.mark.parametrize("who", [pytest.param("nobody", marks=pytest.mark.full), "another engine"])
def test_prefill_that_is_not_at_its_address(who: str) -> None:
    """The handshake fails: nothing was registered, so the blocks are back at once."""
    with closing(Pair(40, {})) as pair:
        there = pair.prefill.peer.side_channel_port if who == "another engine" else free_port()
        peer = replace(pair.prefill.peer, engine_id="before", side_channel_port=there)
        fails(pair, start(pair, peer=peer), "prefill_unreachable", 8.0)
        pair.until(lambda: pair.idle, deadline_s=2)


def test_lease_that_ended_before_the_registration_fails_decode_at_once() -> None:
    """Decode's leg comes when prefill has given the blocks back."""
    with closing(Pair(40, OPTIONS | {"kv_lease_duration": 0.5})) as pair:
        prompt, request_id = random.sample(range(10, 9000), 3 * BLOCK_SIZE), next(_ids)
        pair.prefill.add(request_id, prompt, prefill_leg_params(pair.token))
        pair.until(lambda: pair.prefill.counters["leases_expired"] == 1)
        params = decode_leg_params(pair.prefill.peer, request_id, pair.token)
        request = pair.decode.add(request_id, prompt, params)
        fails(pair, request, "lease_expired", DEADLINE_S / 2)
        pair.until(lambda: pair.idle)


def test_registration_of_another_attempt_fails_at_once(pair: Pair) -> None:
    """Its token is not that of the prefill leg."""
    prompt, request_id = random.sample(range(10, 9000), 3 * BLOCK_SIZE), next(_ids)
    request = pair.decode.add(request_id, prompt, decode_leg_params(pair.prefill.peer, request_id, "b" * 32))
    pair.decode.step()
    pair.prefill.add(request_id, prompt, prefill_leg_params(pair.token))
    fails(pair, request, "token_mismatch", DEADLINE_S / 2)


@pytest.mark.full
def test_decode_that_prefill_cannot_reach_ends_at_the_deadline(pair: Pair) -> None:
    """The registration names a port where nobody listens; neither KV nor notices arrive by it."""
    connector: Any = pair.decode.scheduler.connector
    failed = pair.prefill.counters["notices_failed"]
    with (
        mock.patch.object(connector.connector_scheduler, "side_channel_port", free_port()),
        mock.patch.object(connector.connector_scheduler, "engine_id", "elsewhere"),
    ):
        request = start(pair)
    fails(pair, request, "deadline", 2 * DEADLINE_S)
    pair.until(lambda: pair.prefill.counters["notices_failed"] > failed, 10.0)


def test_decode_engine_that_no_proxy_announced_is_not_reached() -> None:
    """Prefill does not even shake hands with it; once announced it gets its answer, and is served."""
    with closing(Pair(40, OPTIONS)) as pair:
        worker: Any = pair.prefill.workers[0].connector_worker
        worker.announce(["another"])
        fails(pair, start(pair), "deadline", 2 * DEADLINE_S)
        assert pair.decode.engine_id not in worker._remote_agents
        worker.announce(["another", pair.decode.engine_id])
        pair.until(lambda: pair.idle, deadline_s=10)
        request = start(pair)
        pair.until(lambda: pair.decode.received > 0)
        assert pair.decode.holds_kv_of(request)
