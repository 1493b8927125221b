"""The state machine of an attempt: what each event means in each phase."""

from collections.abc import Callable

import pytest
from unit.proxy.attempts_for_tests import (
    OFFSET_S,
    attempt_at,
    bounced,
    decode_step,
    early_token,
    ended,
    flight,
    prefill_end,
)
from vllm.v1.engine import FinishReason

from lockstep.bounce import Bounce
from lockstep.errors import (
    DeadlineError,
    DrainingError,
    InternalError,
    InvalidRequestError,
    KVTransferError,
    LockstepError,
    NodeLostError,
    UnavailableError,
    WrongLegError,
)
from proxy.attempt import Attempt, Phase
from proxy.metrics import AttemptReason

D, E, P, S = Phase.DISPATCHED, Phase.SAMPLED, Phase.PREFILLED, Phase.STREAMING
R = AttemptReason

Event = Callable[[Attempt], object]
Result = Phase | AttemptReason | type[LockstepError]
"""The phase it is in then, the reason of the attempt that follows, or the error that ends the choice."""


def prefill(reason: FinishReason) -> Event:
    return lambda attempt: attempt.on_output("prefill", prefill_end(reason), OFFSET_S)


def bounce(reason: Bounce | str) -> Event:
    return lambda attempt: attempt.on_output("decode", bounced(reason), OFFSET_S)


def decode(reason: FinishReason) -> Event:
    return lambda attempt: attempt.on_output("decode", ended(reason), OFFSET_S)


def prefill_error(error: LockstepError) -> Event:
    return lambda attempt: attempt.on_error("prefill", error)


def decode_error(error: LockstepError) -> Event:
    return lambda attempt: attempt.on_error("decode", error)


def step(attempt: Attempt) -> object:
    return attempt.on_output("decode", decode_step(), OFFSET_S)


def prefill_down(attempt: Attempt) -> None:
    attempt.on_loss("prefill")


def decode_down(attempt: Attempt) -> None:
    attempt.on_loss("decode")


REFUSED = UnavailableError("not ready")

TABLE: dict[str, tuple[Event, Result, Result, Result]] = {
    # event: what it comes to while dispatched or sampled, prefilled, streaming
    "prefill ends by length": (prefill(FinishReason.LENGTH), P, P, S),
    "prefill is stopped": (prefill(FinishReason.ABORT), R.PREFILL_LOST, P, S),
    "prefill fails": (prefill(FinishReason.ERROR), R.PREFILL_FAILED, P, S),
    "prefill stops": (prefill(FinishReason.STOP), InternalError, P, S),
    "prefill repeats itself": (prefill(FinishReason.REPETITION), InternalError, P, S),
    "decode gives tokens": (step, D, S, S),
    "decode finishes": (decode(FinishReason.STOP), D, S, S),
    "decode preempts": (bounce(Bounce.PREEMPTED), R.PREEMPTED, R.PREEMPTED, R.PREEMPTED),
    "decode takes back": (bounce(Bounce.REVOKED), R.REVOKED, R.REVOKED, R.REVOKED),
    "decode says no KV": (bounce(Bounce.KV_LOAD_FAILED), *(R.KV_LOAD_FAILED,) * 3),
    "decode would prefill": (bounce(Bounce.LOCAL_PREFILL), *(R.LOCAL_PREFILL,) * 3),
    "decode is out of context": (bounce(Bounce.CONTEXT_LIMIT), *(InternalError,) * 3),
    "decode fails": (decode(FinishReason.ERROR), R.KV_LOAD_FAILED, R.KV_LOAD_FAILED, InternalError),
    "decode is stopped": (decode(FinishReason.ABORT), *(R.DECODE_LOST,) * 3),
    "decode aborts, why is unknown": (bounce("else"), R.KV_LOAD_FAILED, R.KV_LOAD_FAILED, InternalError),
    "prefill is not ready": (prefill_error(REFUSED), R.REFUSED, R.REFUSED, S),
    "prefill drains": (prefill_error(DrainingError("x")), R.REFUSED, R.REFUSED, S),
    "prefill is too late": (prefill_error(DeadlineError("x")), R.REFUSED, R.REFUSED, S),
    "prefill lost it": (prefill_error(NodeLostError("x")), R.PREFILL_LOST, R.PREFILL_LOST, S),
    "prefill refuses for good": (
        prefill_error(InvalidRequestError("x")),
        *(InvalidRequestError, InvalidRequestError, S),
    ),
    "decode is not ready": (decode_error(REFUSED), R.REFUSED, R.REFUSED, R.REFUSED),
    "decode lost it": (decode_error(NodeLostError("x")), *(R.DECODE_LOST,) * 3),
    "decode reports its KV": (decode_error(KVTransferError("x")), *(R.KV_LOAD_FAILED,) * 3),
    "decode refuses for good": (decode_error(WrongLegError("x")), *(WrongLegError,) * 3),
    "decode has a fault": (decode_error(InternalError("x")), *(InternalError,) * 3),
    "prefill goes away": (prefill_down, R.PREFILL_LOST, R.PREFILL_LOST, S),
    "decode goes away": (decode_down, R.DECODE_LOST, R.DECODE_LOST, R.DECODE_LOST),
}


@pytest.mark.parametrize(("phase", "column"), [(D, 0), (E, 0), (P, 1), (S, 2)])
@pytest.mark.parametrize("event", TABLE)
def test_each_event_in_each_phase(event: str, phase: Phase, column: int) -> None:
    """The whole table; there is no fourth outcome."""
    act, *results = TABLE[event]
    attempt, wanted = attempt_at(phase), results[column]
    if wanted is D:
        wanted = phase
    if isinstance(wanted, Phase):
        act(attempt)
        assert (attempt.phase, attempt.end) == (wanted, None)
    elif isinstance(wanted, AttemptReason):
        assert not act(attempt)
        assert attempt.end is not None
        assert attempt.end.reason is wanted
    else:
        with pytest.raises(wanted) as raised:
            act(attempt)
        assert raised.type is wanted


def test_held_tokens_show_that_the_kv_arrived() -> None:
    """A failure after them is none of the load, though prefill's end has not been heard of yet."""
    attempt = attempt_at(D)
    attempt.on_output("decode", decode_step(), OFFSET_S)
    with pytest.raises(InternalError):
        attempt.on_output("decode", ended(FinishReason.ERROR), OFFSET_S)


def test_stopped_engine_is_lost_whether_the_kv_had_arrived_or_not() -> None:
    """Its abort comes without a reason, also after tokens that are held."""
    attempt = attempt_at(D)
    attempt.on_output("decode", decode_step(), OFFSET_S)
    attempt.on_output("decode", ended(FinishReason.ABORT), OFFSET_S)
    assert attempt.end is not None
    assert (attempt.end.reason, attempt.end.whole_node) == (R.DECODE_LOST, True)


def test_prefills_own_output_is_not_passed_on() -> None:
    """Neither its token nor its finish."""
    attempt = attempt_at(D)
    assert attempt.on_output("prefill", prefill_end(), OFFSET_S) == []


def test_token_that_is_told_early_is_passed_on_once() -> None:
    """Prefill tells it again at its leg's end, and after a preemption before that."""
    attempt = flight(hand_off=True).attempt
    assert attempt is not None
    early = early_token()
    assert attempt.on_output("prefill", early, OFFSET_S) == [early]
    assert (attempt.prefill_scheduled_s, attempt.first_output_s > 0) == (5.0, True)
    held = decode_step()
    assert attempt.on_output("decode", held, OFFSET_S) == []
    assert attempt.on_output("prefill", early_token(), OFFSET_S) == []
    assert attempt.on_output("prefill", prefill_end(), OFFSET_S) == [held]
    assert attempt.phase is S


def test_token_that_comes_early_is_held_back_where_decode_samples_its_own() -> None:
    """There it is none of the client's."""
    attempt = attempt_at(D)
    assert attempt.on_output("prefill", early_token(), OFFSET_S) == []
    assert attempt.phase is D


def test_leg_that_sampled_anew_is_not_gone_on_from() -> None:
    """The client has another token than the one that decode would go on from."""
    attempt = attempt_at(E)
    assert attempt.on_output("decode", decode_step(), OFFSET_S) == []
    attempt.on_output("prefill", early_token(8), OFFSET_S)
    other = prefill_end()
    other.new_token_ids = [8]
    assert attempt.on_output("prefill", other, OFFSET_S) == []
    assert attempt.end is not None
    assert (attempt.end.reason, attempt.end.failed) == (R.PREEMPTED, ())


def test_decode_that_overtakes_prefill_is_held_in_order() -> None:
    """The two nodes' streams are not ordered; nothing is lost and nothing comes twice."""
    attempt = attempt_at(D)
    steps = [decode_step(4), decode_step(5, finish_reason=FinishReason.STOP)]
    assert [attempt.on_output("decode", step, OFFSET_S) for step in steps] == [[], []]
    assert attempt.on_output("prefill", prefill_end(), OFFSET_S) == steps
    assert attempt.phase is S


def test_held_outputs_of_a_dead_attempt_are_gone() -> None:
    """They were not passed on, so the next attempt generates them anew."""
    attempt = attempt_at(D)
    attempt.on_output("decode", decode_step(), OFFSET_S)
    attempt.over()
    assert attempt.on_output("prefill", prefill_end(), OFFSET_S) == []


@pytest.mark.parametrize(
    ("event", "failed", "whole_node"),
    [
        ("decode preempts", (), False),
        ("decode says no KV", ("prefill", "decode"), False),
        ("decode would prefill", ("prefill", "decode"), False),
        ("prefill fails", ("prefill",), False),
        ("prefill drains", ("prefill",), True),
        ("decode is not ready", ("decode",), True),
        ("prefill goes away", ("prefill",), True),
        ("decode goes away", ("decode",), True),
    ],
)
def test_which_ranks_are_to_be_avoided(event: str, failed: tuple[str, ...], whole_node: bool) -> None:
    """None after a preemption, of which the rank is not to blame."""
    attempt = attempt_at(D)
    TABLE[event][0](attempt)
    assert attempt.end is not None
    assert (attempt.end.failed, attempt.end.whole_node) == (failed, whole_node)


def test_role_by_address() -> None:
    """A node that has no leg of it has no say."""
    attempt = attempt_at(D)
    assert [attempt.role_at(address) for address in ("p", "d", "x")] == ["prefill", "decode", None]
