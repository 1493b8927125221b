"""Nodes without a wire or an engine, for Flow alone: they take legs, a test decides what comes of each."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from unit.proxy.nodes_for_tests import node
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason

from kv_transfer.params import parse_decode_leg, parse_prefill_leg
from lockstep.bounce import Bounce
from lockstep.errors import LockstepError
from lockstep.rpc import codec
from lockstep.rpc.generated import lockstep_pb2 as pb
from proxy.cluster import Cluster
from proxy.flight import Flight
from proxy.flow import Flow
from proxy.ids import ChoiceIds
from proxy.nodes import Role
from proxy.outlet import Outlet
from proxy.retries.limits import RetryLimits
from proxy.routing import Ranks

ADDRESSES: dict[str, Role] = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}
ANSWER_TOKENS = 7
MAX_ATTEMPTS = 4
WINDOW_TOKENS = 2
NOT_FOR_CLIENTS = 8888


def answer(choice: int) -> list[int]:
    """What decode generates for a choice, which a leg knows by its prompt."""
    return [choice * 100 + i for i in range(ANSWER_TOKENS)]


@dataclass(eq=False)
class Leg:
    """One leg as its node sees it."""

    address: str
    leg_id: str
    choice: int
    carried: tuple[int, ...]
    hand_off: bool
    sent: int = 0
    """Tokens it has sent."""

    @property
    def left(self) -> list[int]:
        return answer(self.choice)[len(self.carried) + self.hand_off + self.sent :]


@dataclass
class Session:
    """In place of a NodeSession: checks a leg as a node does, and keeps it."""

    world: "World"
    address: str

    def add(self, request_id: str, rank: int, buffers: Sequence[bytes]) -> None:
        request = codec.decode_request(buffers)
        params, (choice,) = request.sampling_params, request.prompt_token_ids
        transfer = params.extra_args["kv_transfer_params"]
        if ADDRESSES[self.address] == "prefill":
            leg = parse_prefill_leg(transfer)
            carried = leg.output_token_ids
            assert params.max_tokens == len(carried) + 1
        else:
            leg = parse_decode_leg(transfer, request_id)
            carried = leg.output_token_ids
            assert len(carried) < params.max_tokens == ANSWER_TOKENS
        assert request.request_id == request_id
        assert int(request_id.rpartition("-t")[2]) <= MAX_ATTEMPTS
        assert list(carried) == answer(choice)[: len(carried)]
        assert list(carried) == self.world.received[choice]
        legs = self.world.legs[self.address]
        assert request_id not in self.world.ever[self.address]
        self.world.ever[self.address].add(request_id)
        legs[request_id] = Leg(self.address, request_id, choice, carried, leg.hand_off)

    def announce(self, engine_ids: Sequence[str]) -> None:
        """Only to prefill nodes, which shake hands with no other engines."""
        assert ADDRESSES[self.address] == "prefill"

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            leg = self.world.legs[self.address].get(request_id)
            if leg is not None:
                self.world.over(leg)


@dataclass
class World:
    """A flow, its four nodes, and all that its clients have been told. Needs a running event loop."""

    hand_off: bool = True
    flow: Flow = field(init=False)
    outlet: Outlet = field(init=False)
    legs: dict[str, dict[str, Leg]] = field(default_factory=lambda: {a: {} for a in ADDRESSES})
    ever: dict[str, set[str]] = field(default_factory=lambda: {a: set() for a in ADDRESSES})
    dead: list[Leg] = field(default_factory=list)
    pushed: set[str] = field(default_factory=set)
    up: set[str] = field(default_factory=set)
    draining: set[str] = field(default_factory=set)
    received: list[list[int]] = field(default_factory=list)
    ends: list[list[str]] = field(default_factory=list)
    """How each choice ended; it must be once."""

    def __post_init__(self) -> None:
        self._ids = ChoiceIds()
        prefill = [a for a, role in ADDRESSES.items() if role == "prefill"]
        decode = [a for a, role in ADDRESSES.items() if role == "decode"]
        self.flow = Flow(
            Cluster(prefill, decode),
            Ranks(WINDOW_TOKENS),
            1e6,
            MAX_ATTEMPTS,
            hand_off=self.hand_off,
            retry_limits=RetryLimits(backoff_s=0.0),
        )
        self.outlet = Outlet(fail_request=self._fail)
        for address in ADDRESSES:
            self.node_up(address)

    def node_up(self, address: str) -> None:
        role = ADDRESSES[address]
        self.up.add(address)
        self.draining.discard(address)
        described = node(role, address, num_ranks=1 if role == "prefill" else 2)
        self.flow.node_up(Session(self, address), described, ())  # type: ignore[arg-type]

    def node_down(self, address: str) -> None:
        self.up.discard(address)
        self.legs[address].clear()
        self.flow.node_down(address, "gone")

    def drain(self, address: str, move: bool) -> None:
        """The node takes nothing new, and goes on with what it has until it goes down."""
        self.draining.add(address)
        self.flow.frame(address, pb.NodeFrame(draining=pb.Draining(deadline_s=30.0, move=move)))

    def hedge(self, flight: Flight) -> None:
        """Its prompt is not computed, and somebody has no more patience."""
        assert flight.attempt is not None
        self.flow._dispatcher.hedge(flight, flight.attempt)

    def start(self) -> None:
        """A choice of its own, or for every second one a sibling of the one before."""
        choice = len(self.received)
        self.received.append([])
        self.ends.append([])
        params = SamplingParams(max_tokens=ANSWER_TOKENS)
        request = EngineCoreRequest(f"c{choice}", [choice], None, params, None, 0.0, None, None, None)
        self.flow.start(Flight(request.request_id, request, self._ids.new(), 1, self.outlet))

    def client_leaves(self, choice: int) -> None:
        if not self.ends[choice]:
            self.ends[choice].append("left")
            self.flow.abort([f"c{choice}"], "disconnected")

    def output(
        self,
        leg: Leg,
        tokens: list[int],
        end: FinishReason | None = None,
        stop_reason: str | None = None,
    ) -> None:
        """A step of the leg's node."""
        if end is not None:
            self.over(leg)
        leg.sent += len(tokens)
        output = EngineCoreOutput(leg.leg_id, tokens, finish_reason=end, stop_reason=stop_reason)
        outputs = EngineCoreOutputs(outputs=[output], timestamp=time.monotonic())
        step = pb.StepOutputs(rank=0, outputs=codec.encode_outputs(outputs))
        self.flow.frame(leg.address, pb.NodeFrame(step=step))

    def bounce(self, leg: Leg, bounce: Bounce) -> None:
        self.output(leg, [], FinishReason.ABORT, str(bounce))

    def sampled(self, leg: Leg) -> None:
        """Prefill tells a promised token; it goes on to the leg's end, which tells it again."""
        self.output(leg, [answer(leg.choice)[len(leg.carried)]])

    def prefilled(self, leg: Leg) -> None:
        self.pushed.add(leg.leg_id)
        token = answer(leg.choice)[len(leg.carried)] if leg.hand_off else NOT_FOR_CLIENTS
        self.output(leg, [token], FinishReason.LENGTH)

    def decoded(self, leg: Leg, most: int) -> None:
        tokens = leg.left[:most]
        self.output(leg, tokens, FinishReason.STOP if len(tokens) == len(leg.left) else None)

    def refuse(self, leg: Leg, error: LockstepError) -> None:
        self.over(leg)
        refusal = pb.RequestError(request_id=leg.leg_id, code=type(error).__name__, message="no")
        self.flow.frame(leg.address, pb.NodeFrame(error=refusal))

    def deliver(self) -> None:
        """The front end reads: each choice's tokens are the next of its answer, and none follow its end."""
        while not self.outlet.outputs.empty():
            for output in self.outlet.outputs.get_nowait().outputs:
                choice = int(output.request_id[1:])
                if self.ends[choice]:
                    continue  # vLLM ignores what comes for a request that it has dropped
                self.received[choice] += output.new_token_ids
                assert self.received[choice] == answer(choice)[: len(self.received[choice])]
                if output.finish_reason is not None:
                    # With prefill's token the answer ends by its limit: no stop token is asked for.
                    assert output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
                    assert self.received[choice] == answer(choice)
                    self.ends[choice].append("finished")

    def check(self) -> None:
        """Loads are those of the live attempts, and each choice has ended at most once."""
        self.deliver()
        assert all(len(ends) <= 1 for ends in self.ends)
        assert self.flow.num_in_flight == sum(not ends for ends in self.ends)
        loads = [load for address in self.up for load in self.flow.ranks.of(address).values()]
        decoding = [load for load in loads if load.node.role == "decode"]
        hedges = sum(flight.hedge is not None for flight in self.flow.in_flight())
        live = self.flow.num_in_flight - self.flow.num_queued + hedges
        assert sum(load.in_flight for load in decoding) == live
        assert all(load.in_flight >= 0 and load.outstanding_tokens >= 0 for load in loads)
        if not self.flow.num_in_flight:
            assert {(load.in_flight, load.outstanding_tokens) for load in loads} <= {(0, 0)}
            assert not any(self.legs.values())

    def over(self, leg: Leg) -> None:
        """The node is done with it; what it says of it later is late."""
        if self.legs[leg.address].pop(leg.leg_id, None) is not None:
            self.dead.append(leg)

    def _fail(self, front_id: str, error: LockstepError) -> list[str]:
        """As the front end does: the choice and its sibling get the error, unless they ended before."""
        choice = int(front_id[1:])
        pair = [c for c in (choice & ~1, choice | 1) if c < len(self.ends) and not self.ends[c]]
        assert choice in pair, "a choice that had ended was failed"
        self.deliver_before_error()
        for c in pair:
            self.ends[c].append(type(error).__name__)
        return [f"c{c}" for c in pair]

    def deliver_before_error(self) -> None:
        """What was passed on before is on its way to the front end already."""
        self.deliver()
