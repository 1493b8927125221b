"""The simulated transfer on prefill's side: who gets which KV, and when blocks come back."""

import asyncio
from collections.abc import Callable

from unit.sim.rows_for_tests import row

from lockstep.sim.pushes import Pushes
from lockstep.sim.rows import Row
from lockstep.sim.wire import Cancel, Pushed, Refused, Register, ToDecode


class Side:
    """The pushes of one rank, and what they said and gave back."""

    def __init__(self, lease_s: float = 5.0, push_s: float = 0.0) -> None:
        self.released: list[Row] = []
        self.answers: list[ToDecode] = []
        self.pushes = Pushes("e", lease_s, lambda _: push_s, self.released.append)

    def register(self, token: str = "t", engine_id: str = "e") -> None:
        self.pushes.take(Register("a", engine_id, token), self.answers.append)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(2):
            while not condition():  # noqa: ASYNC110 - timers of the loop
                await asyncio.sleep(0)


async def test_either_may_come_first() -> None:
    """A registration and a computed prompt are joined, and the blocks come back with the push."""
    for registers_first in (True, False):
        side, prompt = Side(), row("a", [5])
        calls = [side.register, lambda s=side, p=prompt: s.pushes.computed(p)]
        for call in calls if registers_first else reversed(calls):
            call()
        await side.until(lambda s=side: s.answers)
        assert side.answers == [Pushed("a")]
        assert side.released == [prompt]
        assert side.pushes.held == 0


async def test_another_token_gets_nothing() -> None:
    """The KV of the attempt before is not for this one; the prompt stays for who has its token."""
    side = Side()
    side.pushes.computed(row("a", [5]))
    side.register(token="other")
    assert side.answers == [Refused("a", "another token")]
    assert side.pushes.held == 1
    side.pushes.close()


async def test_another_engine_is_refused() -> None:
    """The process that was meant has been started anew since."""
    side = Side()
    side.register(engine_id="before")
    assert side.answers == [Refused("a", "another engine")]


async def test_decode_hears_of_an_aborted_prompt() -> None:
    """Which it would wait for."""
    side = Side()
    side.register()
    side.pushes.give_up("a")
    assert side.answers == [Refused("a", "aborted")]


async def test_a_cancel_frees_the_blocks() -> None:
    """Also while they are being pushed; nothing is said afterwards."""
    side = Side(push_s=5.0)
    prompt = row("a", [5])
    side.pushes.computed(prompt)
    side.register()
    side.pushes.take(Cancel("a"), side.answers.append)
    assert side.released == [prompt]
    assert side.answers == []


async def test_a_lease_ends() -> None:
    """A prompt that nobody registers for is not held for ever."""
    side = Side(lease_s=0.0)
    side.pushes.computed(row("a", [5]))
    await side.until(lambda: side.released)
    assert side.pushes.leases_expired == 1


async def test_registrations_end_with_their_connection() -> None:
    """A computed prompt then waits for its lease, not for a peer that is gone."""
    side = Side()
    answer = side.answers.append
    side.pushes.take(Register("a", "e", "t"), answer)
    side.pushes.lost(answer)
    side.pushes.computed(row("a", [5]))
    assert side.pushes.held == 1
    side.pushes.close()
