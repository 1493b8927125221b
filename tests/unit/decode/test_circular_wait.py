"""What the decode scheduler does with prefill's answers while its rank stands still for want of blocks."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from simulator.client import Ask, Client
from simulator.engine import Engine
from simulator.receiver import Push
from simulator.shape import Shape
from vllm.v1.request import RequestStatus

from lockstep.bounce import Bounce

NEVER = Push(outcome="silent")
AT_ONCE = Push(delay=0)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Rank:
    """Its pool holds one long prompt; the first request has it, and prefill does not begin with it."""

    def __init__(self) -> None:
        self._shape = Shape(spare_blocks=0)
        self.engine = Engine(self._shape, 0)
        self._now = 0
        self.first = self.add("first", NEVER)
        self.step()
        self.second, self.third = self.add("second", AT_ONCE), self.add("third", AT_ONCE)

    def add(self, name: str, push: Push) -> Any:
        client = Client(Ask(prompt_tokens=36, max_tokens=3), name, self._shape)
        request = client.make_request(self._now)
        self.engine.add(request, client.conversation, push)
        return request

    def step(self) -> list[Any]:
        """The outputs that end a request."""
        by_client = self.engine.step(self._now)
        self._now += 1
        found = [output for outputs in by_client.values() for output in outputs.outputs]
        return [output for output in found if output.finish_reason is not None]

    def ends(self, num_steps: int) -> list[tuple[str, str]]:
        """(request id, stop reason or finish reason) of what ended in so many steps, in order."""
        ended = [output for _ in range(num_steps) for output in self.step()]
        return [(output.request_id, str(output.stop_reason or output.finish_reason)) for output in ended]

    def revoke_first(self) -> None:
        self.engine.receiver.revoke(self.first.request_id, self._now)


def test_revoked_reservation_goes_back_with_its_own_reason() -> None:
    """The proxy blames no node for it; the blocks go to the next in the queue."""
    rank = Rank()
    assert rank.ends(3) == []
    rank.revoke_first()
    ended = rank.ends(8)
    assert ended[0] == (rank.first.request_id, "lockstep_revoked")
    assert ended[1] == (rank.second.request_id, "length")
    assert rank.engine.scheduler.lockstep_counters()["bounced"] == {Bounce.REVOKED: 1}


def test_request_that_prefill_has_finished_gets_blocks_first() -> None:
    """Prefill's blocks come free with it, whatever came before it."""
    rank = Rank()
    rank.step()
    rank.engine.receiver.offer(rank.third.request_id)
    rank.step()
    rank.step()
    rank.revoke_first()
    ended = [request_id for request_id, _ in rank.ends(20)]
    assert ended == [rank.first.request_id, rank.third.request_id, rank.second.request_id]


def test_late_offer_changes_nothing() -> None:
    """It has its blocks, or is over."""
    rank = Rank()
    rank.engine.abort(rank.second.request_id, late=False)
    for request in (rank.first, rank.second):
        rank.engine.receiver.offer(request.request_id)
    rank.step()
    assert rank.ends(3) == []
    assert rank.first.status == RequestStatus.WAITING_FOR_REMOTE_KVS
