"""Two push writers over two real NIXL agents; only vLLM's worker around each is reduced to what they use."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from nixl._api import nixl_agent

from kv_transfer.agent import agent_class
from kv_transfer.config import ConnectorOptions
from kv_transfer.counters import KVCounters
from kv_transfer.decode_ledger import Done, Fail
from kv_transfer.notices import DecodePeer, Registration
from kv_transfer.params import PrefillPeer
from kv_transfer.prefill_ledger import PUSHED, Complete, Release
from kv_transfer.push_plan import GroupLayout
from kv_transfer.writer import PushWriter, drain

RID = "ls-1-0-a1"
TOKEN = "a" * 32
PREFILL = PrefillPeer("prefill", "127.0.0.1", 5600, 1)
DECODE = DecodePeer("decode", "127.0.0.1", 5700, 1)
LAYOUT = (GroupLayout(block_size=16, streamed=True),)


class Worker:
    """The part of vLLM's NIXL worker that a writer uses, already connected to the other engine."""

    def __init__(self, name: str, peer: str) -> None:
        self.nixl_wrapper = agent_class(nixl_agent, 1000)(name)
        self.world_size = 1
        self._handshake_lock = threading.RLock()
        self._remote_agents = {peer: {(0, 0): peer}}
        self._push_writer_wake = threading.Event()
        self._recving_metadata: dict[str, Any] = {}

    def _ensure_handshake(self, *address: Any) -> None:
        return None


class Pair:
    def __init__(self) -> None:
        self.workers = Worker("prefill", "decode"), Worker("decode", "prefill")
        agents = [worker.nixl_wrapper for worker in self.workers]
        agents[0].add_remote_agent(agents[1].get_agent_metadata())
        agents[1].add_remote_agent(agents[0].get_agent_metadata())
        self.counters = KVCounters(), KVCounters()
        self.prefill, self.decode = (
            PushWriter(worker, DECODE, LAYOUT, ConnectorOptions(), counters, consumer=consumer)
            for worker, counters, consumer in zip(self.workers, self.counters, (False, True), strict=True)
        )

    def until(self, condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
        end = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < end, "not reached in time"
            self.prefill.step()
            self.decode.step()
            time.sleep(0.001)

    def register(self, token: str = TOKEN) -> None:
        """Decode opens a receive of two blocks and registers it, as vLLM's scheduler words it."""
        registration = {
            "request_id": RID,
            "lockstep_token": token,
            "decode_engine_id": "decode",
            "decode_host": "127.0.0.1",
            "decode_port": 5700,
            "decode_tp_size": 1,
            "local_block_ids": [[3, 4]],
            "lockstep_start_blocks": [0],
            "lockstep_block_sizes": [16],
            "remote_engine_id": "prefill",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "remote_tp_size": 1,
        }
        self.decode.decode.opened(RID, PREFILL, token, 2, time.monotonic())
        self.decode.register(RID, registration)
        self.until(lambda: self.prefill.prefill.outstanding)

    def results(self) -> list[Fail | Done]:
        found: list[Fail | Done] = []

        def done() -> bool:
            found.extend(drain(self.decode.receive_results))
            return any(isinstance(result, Done) for result in found)

        self.until(done)
        return found


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.workers[0].nixl_wrapper.remove_remote_agent("decode")
    made.workers[1].nixl_wrapper.remove_remote_agent("prefill")


def test_prefill_abort_reaches_decode(pair: Pair) -> None:
    """Registered, then aborted on prefill: the receive fails with prefill's reason, the blocks are back."""
    pair.register()
    pair.prefill.do(pair.prefill.prefill.ended(RID, "finished_aborted", time.monotonic()))
    assert pair.results() == [Fail(RID, "finished_aborted"), Done(RID, received=False)]
    assert pair.counters[1].snapshot()["failed"] == {"finished_aborted": 1}


def test_decode_abort_is_answered_and_stops_the_push(pair: Pair) -> None:
    """Cancelled while prefill computes: decode gets its fence, and the finished prompt is released."""
    pair.register()
    pair.decode.do(pair.decode.decode.aborted(RID, "aborted", time.monotonic()))
    assert pair.results() == [Done(RID, received=False)]
    pair.prefill.do(pair.prefill.prefill.finished(RID, ((1, 2),), TOKEN, time.monotonic()))
    assert list(drain(pair.prefill.to_release)) == [RID]


def test_wrong_token_is_refused_over_the_wire(pair: Pair) -> None:
    """The request on decode fails at once; prefill's blocks stay for the right registration."""
    pair.register(token="b" * 32)
    pair.prefill.do(pair.prefill.prefill.finished(RID, ((1, 2),), TOKEN, time.monotonic()))
    assert pair.results() == [Fail(RID, "token_mismatch"), Done(RID, received=False)]
    assert list(drain(pair.prefill.to_release)) == []
    assert pair.counters[0].snapshot()["refused"] == {"token_mismatch": 1}


def test_malformed_notifications_are_counted(pair: Pair) -> None:
    """Whatever a peer sends, the writer goes on."""
    agent = pair.workers[1].nixl_wrapper
    for data in (b"PUSH_REG:\xc1", b"LOCKSTEP/2:\xc1", b"\xff\xfe", b"no-number:x"):
        agent.send_notif("prefill", data)
    pair.until(lambda: pair.counters[0].snapshot()["malformed_notices"] == 4)


def test_an_idle_writer_does_not_wake_itself(pair: Pair) -> None:
    """A round with nothing to do leaves the thread parked; otherwise it spins on an idle engine."""
    pair.prefill.step()
    assert not pair.workers[0]._push_writer_wake.is_set()
    assert pair.prefill.poll_interval_s() >= 0.02


def test_a_waiting_writer_looks_often_but_still_sleeps(pair: Pair) -> None:
    """While a receive is outstanding the writer polls, it does not spin."""
    pair.register()
    pair.workers[1]._push_writer_wake.clear()
    pair.decode.step()
    assert not pair.workers[1]._push_writer_wake.is_set()
    assert 0 < pair.decode.poll_interval_s() <= 0.005


def test_each_piece_of_news_wakes_the_engine(pair: Pair) -> None:
    """On decode a failure and the end of its fence; there is news until somebody takes it."""
    told: list[bool] = []
    pair.decode.on_news = lambda: told.append(pair.decode.has_news())
    pair.register()
    assert not pair.decode.has_news()
    pair.prefill.do(pair.prefill.prefill.ended(RID, "finished_aborted", time.monotonic()))
    assert pair.results() == [Fail(RID, "finished_aborted"), Done(RID, received=False)]
    assert told == [True, True]
    assert not pair.decode.has_news()


def test_blocks_to_release_wake_the_engine(pair: Pair) -> None:
    """Prefill's engine needs no step of its own to learn that they are free."""
    told: list[str] = []
    pair.prefill.on_news = lambda: told.append("released")
    pair.register()
    pair.decode.do(pair.decode.decode.aborted(RID, "aborted", time.monotonic()))
    pair.results()
    assert not told
    pair.prefill.do(pair.prefill.prefill.finished(RID, ((1, 2),), TOKEN, time.monotonic()))
    assert told == ["released"]
    assert pair.prefill.has_news()


def test_blocks_of_a_push_are_released_behind_its_notice(pair: Pair) -> None:
    """Decode waits for the notice, and the engine that the release wakes would take turns with its sender."""
    order: list[str] = []
    notify = pair.prefill.peers.notify

    def told(engine_id: str, data: bytes) -> bool:
        order.append("told")
        return notify(engine_id, data)

    pair.prefill.on_news = lambda: order.append("released")
    registration = Registration(RID, TOKEN, DECODE, ((),), (0,), (16,), float("inf"), {})
    with mock.patch.object(pair.prefill.peers, "notify", side_effect=told):
        pair.prefill.do([Complete(RID, registration, 0, 0.0), Release(RID, PUSHED)])
        pair.prefill.step()
    assert order == ["told", "released"]
    assert list(drain(pair.prefill.to_release)) == [RID]


def test_writer_looks_within_half_a_millisecond_where_the_engine_is_woken(pair: Pair) -> None:
    """Otherwise the engine looks each millisecond itself, and so does the writer."""
    pair.register()
    assert pair.decode.poll_interval_s() == 0.001
    pair.decode.on_news = lambda: None
    assert pair.decode.poll_interval_s() == 0.0005
