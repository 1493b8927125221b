"""Prefill's ledger under random orders of everything that can happen to pushes, against a model of memory.

The model is unkind: a write may read its source as late as its end, blocks hold garbage as soon as vLLM may
have given them away, and nothing orders two writes in flight.
"""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kv_transfer.notices import Ask, Cancel, DecodePeer, Registration
from kv_transfer.prefill_ledger import Action, Complete, Offer, PrefillLedger, Release, Reply, Warn, Write
from kv_transfer.push_plan import Chunk, GroupLayout

PEER = DecodePeer("d0", "127.0.0.1", 5700, 1)
REQUESTS = ("r0", "r1")
TOKEN, FORGED = "a" * 32, "b" * 32
GARBAGE = ("garbage",)
TTL_S = 50.0

request_ids = st.sampled_from(REQUESTS)


@dataclass
class Prefill:
    """One request on prefill: which of its blocks are computed, in which life between preemptions."""

    num_blocks: int
    streamed: bool = True
    state: str = "new"  # computing, held, gone
    life: int = 0
    blocks: list[int] = field(default_factory=list)


class Pushes(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = PrefillLedger((GroupLayout(16, streamed=True),), TTL_S, 1000)
        self.now = 0.0
        self.next_block = 1
        self.prefill = {request_id: Prefill(4) for request_id in REQUESTS}
        self.memory: dict[int, tuple[object, ...]] = {}  # of prefill and of decode, by block id
        self.registrations: dict[str, list[Registration]] = {request_id: [] for request_id in REQUESTS}
        self.answered: set[tuple[str, str]] = set()  # (request, token)
        self.completed: set[str] = set()
        self.queued: list[Write] = []
        self.in_flight: list[tuple[Write, int]] = []  # with the life that it was started in
        self.writes_of: Counter[tuple[int, int]] = Counter()  # (decode's block, life)

    @initialize(registered=st.booleans(), start=st.integers(0, 4), streamed=st.booleans())
    def begin(self, registered: bool, start: int, streamed: bool) -> None:
        """The first request streams and is often expected, so that long runs of it come up."""
        self.prefill["r1"].streamed = streamed
        if registered:
            self._register("r0", TOKEN, start, 4 - start, 40.0)

    # -- what happens on prefill ------------------------------------------------------------------------

    @rule(request_id=request_ids, num_new=st.integers(1, 3))
    def compute(self, request_id: str, num_new: int) -> None:
        prefill = self.prefill[request_id]
        left = prefill.num_blocks - len(prefill.blocks)
        if prefill.state not in ("new", "computing") or not left or not prefill.streamed:
            return
        prefill.state = "computing"
        start = len(prefill.blocks)
        new = tuple(self._fill(request_id, start + index) for index in range(min(num_new, left)))
        prefill.blocks += new
        chunk = Chunk((start,), (new,), last=len(prefill.blocks) == prefill.num_blocks)
        foreseen = self.ledger.foreseen(request_id, TOKEN, chunk)
        actions = self.ledger.computed(request_id, TOKEN, chunk, self.now)
        writes = [action for action in actions if isinstance(action, Write)]
        if writes or self.now < 40.0:  # past a registration's deadline nothing is written
            assert [(write.local_block_ids, write.remote_block_ids) for write in writes[:1]] == [
                (one[0].local, one[0].remote) for one in [foreseen] if one is not None
            ]
        self._do(actions)

    @rule(request_id=request_ids)
    def compute_and_start(self, request_id: str) -> None:
        """What usually happens."""
        self.compute(request_id, 1)
        while self.queued:
            self._start(self.queued.pop(0))

    @rule(request_id=request_ids)
    def preempt(self, request_id: str) -> None:
        prefill = self.prefill[request_id]
        if prefill.state != "computing":
            return
        self._free(prefill)
        prefill.life += 1
        self.ledger.preempted(request_id)

    @rule(request_id=request_ids)
    def finish(self, request_id: str) -> None:
        """Also without chunks before it, as for groups that are not streamed."""
        prefill = self.prefill[request_id]
        whole = len(prefill.blocks) == prefill.num_blocks
        if prefill.state not in ("new", "computing") or (prefill.streamed and not whole):
            return
        if not whole:
            prefill.blocks = [self._fill(request_id, index) for index in range(prefill.num_blocks)]
        prefill.state = "held"
        self._do(self.ledger.finished(request_id, (tuple(prefill.blocks),), TOKEN, self.now))

    @precondition(lambda self: self.now > 2.0)
    @rule(request_id=request_ids)
    def abort_prefill(self, request_id: str) -> None:
        self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        prefill = self.prefill[request_id]
        if prefill.state not in ("new", "computing"):
            return
        prefill.state = "gone"
        self._free(prefill)
        self._do(self.ledger.ended(request_id, "finished_aborted", self.now))

    @rule(request_id=request_ids)
    def abandon(self, request_id: str) -> None:
        if self.prefill[request_id].state == "held":
            self._do(self.ledger.abandoned(request_id, "aborted_after_prefill", self.now))

    @rule(request_id=request_ids)
    def expire_lease(self, request_id: str) -> None:
        prefill = self.prefill[request_id]
        if prefill.state == "held" and not self.ledger.is_pushing(request_id):
            prefill.state = "gone"
            self._free(prefill)
            self.ledger.lease_expired(request_id, self.now)

    # -- what comes from decode -------------------------------------------------------------------------

    @rule(request_id=request_ids, start=st.integers(0, 4), life_s=st.sampled_from([1.0, 20.0, 40.0]))
    def register(self, request_id: str, start: int, life_s: float) -> None:
        if any(registration.token == TOKEN for registration in self.registrations[request_id]):
            return
        self._register(request_id, TOKEN, start, 4 - start, life_s)

    @rule(request_id=request_ids)
    def register_with_another_token(self, request_id: str) -> None:
        if len(self.registrations[request_id]) < 2:
            self._register(request_id, FORGED, 0, 4, 20.0)

    @rule(request_id=request_ids)
    def repeat_registration(self, request_id: str) -> None:
        for registration in self.registrations[request_id]:
            if (request_id, registration.token) not in self.answered:
                self._do(self.ledger.registered(registration, self.now))

    @precondition(lambda self: self.now > 2.0)
    @rule(request_id=request_ids, token=st.sampled_from([TOKEN, FORGED]))
    def cancel(self, request_id: str, token: str) -> None:
        registered = any(registration.token == token for registration in self.registrations[request_id])
        cancel = Cancel(request_id, token, "aborted", registered, PEER)
        self._do(self.ledger.cancelled(cancel, self.now))

    @precondition(lambda self: self.now > 2.0)
    @rule(request_id=request_ids, token=st.sampled_from([TOKEN, FORGED]))
    def ask(self, request_id: str, token: str) -> None:
        registered = any(registration.token == token for registration in self.registrations[request_id])
        self._do(self.ledger.asked(Ask(request_id, token, registered, PEER), self.now))

    # -- what NIXL does ---------------------------------------------------------------------------------

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def start_write(self, data: st.DataObject) -> None:
        self._start(self.queued.pop(data.draw(st.integers(0, len(self.queued) - 1))))

    @precondition(lambda self: self.queued and self.now > 2.0)
    @rule(data=st.data())
    def cannot_reach_decode(self, data: st.DataObject) -> None:
        write = self.queued.pop(data.draw(st.integers(0, len(self.queued) - 1)))
        self._do(self.ledger.settled(write, 0, "decode_unreachable", self.now))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def end_write(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.in_flight) - 1))
        self._settle(*self.in_flight.pop(index), None)

    @precondition(lambda self: self.in_flight and self.now > 2.0)
    @rule(data=st.data())
    def fail_write(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.in_flight) - 1))
        self._settle(*self.in_flight.pop(index), "push_failed")

    @rule(seconds=st.sampled_from([0.5, 0.5, 2.0, 15.0, 60.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self._do(self.ledger.tick(self.now))

    # -- the model --------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Whatever is under way comes to its end, and then nothing is left and nobody waits."""
        for request_id in REQUESTS:
            self._abort(request_id)
        while self.queued or self.in_flight:
            while self.queued:
                self._start(self.queued.pop(0))
            while self.in_flight:
                self._settle(*self.in_flight.pop(0), None)
        for request_id in REQUESTS:
            self.expire_lease(request_id)
            assert self.prefill[request_id].state in ("new", "gone") or self.ledger.is_pushing(request_id)
        self.pass_time(100.0)
        self.pass_time(TTL_S)
        assert not self.ledger.outstanding
        assert not any(request_id in self.ledger._tombstones for request_id in REQUESTS)
        for request_id, registrations in self.registrations.items():
            assert self.prefill[request_id].state != "held"
            for registration in registrations:
                assert (request_id, registration.token) in self.answered

    def _register(self, request_id: str, token: str, start: int, num_blocks: int, life_s: float) -> None:
        blocks = tuple(self._fill(request_id, -1) for _ in range(num_blocks))
        registration = Registration(
            request_id, token, PEER, (blocks,), (start,), (16,), self.now + life_s, {}
        )
        self.registrations[request_id].append(registration)
        self._do(self.ledger.registered(registration, self.now))

    def _fill(self, request_id: str, place: int) -> int:
        """A new block with the KV of this place, or with nothing on decode's side."""
        self.next_block += 1
        life = self.prefill[request_id].life
        self.memory[self.next_block] = (request_id, place, life) if place >= 0 else GARBAGE
        return self.next_block

    def _free(self, prefill: Prefill) -> None:
        for block in prefill.blocks:
            self.memory[block] = GARBAGE
        prefill.blocks = []

    def _start(self, write: Write) -> None:
        wanted, actions = self.ledger.starting(write, self.now)
        if wanted:
            assert self.now < write.registration.deadline
            key = (write.request_id, write.registration.token)
            assert key not in self.answered, "a write after decode was told that none follows"
            mine = set(write.remote_block_ids[0])
            for other, _ in self.in_flight:
                assert not mine & set(other.remote_block_ids[0]), "two writes to one block in flight"
            self.in_flight.append((write, self.prefill[write.request_id].life))
        self._do(actions)

    def _settle(self, write: Write, life: int, failure: str | None) -> None:
        for local, remote in zip(write.local_block_ids[0], write.remote_block_ids[0], strict=True):
            self.memory[remote] = self.memory[local]
            self.writes_of[remote, life] += 1
        self._do(self.ledger.settled(write, 10, failure, self.now))

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Write():
                    assert action.registration.token == TOKEN
                    assert len(action.local_block_ids[0]) == len(action.remote_block_ids[0]) > 0
                    self.queued.append(action)
                case Complete():
                    self._check_complete(action)
                case Offer():
                    assert action.token == TOKEN
                    assert self.prefill[action.request_id].state == "held"
                case Warn():
                    assert self._in_flight(action.request_id, action.token)
                case Reply():
                    assert not self._in_flight(action.request_id, action.token)
                    self.answered.add((action.request_id, action.token))
                case Release():
                    prefill = self.prefill[action.request_id]
                    assert prefill.state == "held", "released twice, or nothing was held"
                    prefill.state = "gone"
                    self._free(prefill)

    def _check_complete(self, action: Complete) -> None:
        request_id, registration = action.request_id, action.registration
        assert request_id not in self.completed
        assert not self._in_flight(request_id, TOKEN)
        life = self.prefill[request_id].life
        for index, block in enumerate(registration.block_ids[0]):
            assert self.memory[block] == (request_id, registration.start_blocks[0] + index, life)
            assert self.writes_of[block, life] == 1
        self.completed.add(request_id)
        self.answered.add((request_id, TOKEN))

    def _in_flight(self, request_id: str, token: str) -> bool:
        return any(
            write.request_id == request_id and write.registration.token == token
            for write, _ in self.in_flight
        )


TestPushes = Pushes.TestCase
TestPushes.settings = settings(
    max_examples=250, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
