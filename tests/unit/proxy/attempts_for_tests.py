"""Builds attempts, choices and the outputs of their legs for the tests of this folder."""

from unit.proxy.nodes_for_tests import node
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.metrics.stats import PrefillStats

from lockstep.bounce import Bounce
from proxy.attempt import Attempt, Phase
from proxy.flight import Flight
from proxy.outlet import Outlet
from proxy.routing import RankLoad

OFFSET_S = -1000.0
FRONT_ID = "cmpl-a-12345678"


def request(front_id: str = FRONT_ID, **params: object) -> EngineCoreRequest:
    sampling = SamplingParams(**{"max_tokens": 40, **params})
    return EngineCoreRequest(front_id, [1, 2], None, sampling, None, 0.0, None, None, None)


def loads(num_ranks: int = 1) -> tuple[RankLoad, RankLoad]:
    """Rank 0 of a prefill node "p" and of a decode node "d"."""
    prefill, decode = node("prefill", "p", num_ranks), node("decode", "d", num_ranks)
    return RankLoad(prefill, prefill.ranks[0], 1), RankLoad(decode, decode.ranks[0], 1)


def flight(num_ranks: int = 1, *, hand_off: bool = False, **params: object) -> Flight:
    """A choice whose first attempt was sent."""
    made = Flight(FRONT_ID, request(**params), "ls-0-1", 2, Outlet())
    made.begin(*loads(num_ranks), hand_off=hand_off)
    return made


def attempt_at(phase: Phase) -> Attempt:
    """One that has come so far."""
    made = flight(hand_off=phase is Phase.SAMPLED).attempt
    assert made is not None
    if phase is Phase.SAMPLED:
        made.on_output("prefill", early_token(), OFFSET_S)
    elif phase is not Phase.DISPATCHED:
        made.on_output("prefill", prefill_end(), OFFSET_S)
    if phase is Phase.STREAMING:
        made.on_output("decode", decode_step(), OFFSET_S)
    assert (made.phase, made.end) == (phase, None)
    return made


def prefill_end(reason: FinishReason = FinishReason.LENGTH) -> EngineCoreOutput:
    event = EngineCoreEvent(EngineCoreEventType.SCHEDULED, 1005.0)
    return EngineCoreOutput(
        "leg", [9], finish_reason=reason, events=[event], prefill_stats=PrefillStats(2, 1, 1, 1)
    )


def early_token(token: int = 9) -> EngineCoreOutput:
    """What `prefill_end` gives again, told before it."""
    event = EngineCoreEvent(EngineCoreEventType.SCHEDULED, 1005.0)
    return EngineCoreOutput("leg", [token], events=[event], prefill_stats=PrefillStats(2, 1, 1, 1))


def decode_step(*tokens: int, **fields: object) -> EngineCoreOutput:
    """Tokens 4 and 5 if not said otherwise, and what a node adds."""
    return EngineCoreOutput("leg", list(tokens or (4, 5)), kv_transfer_params={"secret": 1}, **fields)


def bounced(bounce: Bounce | str) -> EngineCoreOutput:
    return EngineCoreOutput("leg", [], finish_reason=FinishReason.ABORT, stop_reason=str(bounce))


def ended(reason: FinishReason) -> EngineCoreOutput:
    """An end of decode without tokens."""
    return EngineCoreOutput("leg", [], finish_reason=reason)
