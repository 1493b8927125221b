"""What the front end gets of a choice's attempts: one stream, as of one engine."""

import pytest
from unit.proxy.attempts_for_tests import (
    FRONT_ID,
    OFFSET_S,
    bounced,
    decode_step,
    flight,
    loads,
    prefill_end,
)
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import PrefillStats

from lockstep.bounce import Bounce
from proxy import flight_log
from proxy.flight import Flight
from proxy.metrics import AttemptReason

QUEUED, SCHEDULED = EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED
PREEMPTED = EngineCoreEventType.PREEMPTED


def streaming(made: Flight, *tokens: int, **fields: object) -> list[EngineCoreOutput]:
    """Prefill of the live attempt ends, and decode's first step is passed on."""
    made.on_output("prefill", prefill_end(), OFFSET_S)
    return made.on_output("decode", decode_step(*tokens, **fields), OFFSET_S)


def again(made: Flight, bounce: Bounce = Bounce.PREEMPTED) -> None:
    """The live attempt is handed back, and the next one is sent."""
    made.on_output("decode", bounced(bounce), OFFSET_S)
    made.attempt_over()
    made.begin(*loads(), hand_off=False)


def types(output: EngineCoreOutput) -> list[EngineCoreEventType]:
    return [event.type for event in output.events or ()]


def test_decode_outputs_go_out_under_the_front_ends_id() -> None:
    """Without what the nodes agreed between them; the tokens are kept for a next attempt."""
    made = flight()
    (output,) = streaming(made)
    assert (output.request_id, output.new_token_ids) == (FRONT_ID, [4, 5])
    assert output.kv_transfer_params is None
    assert made.output_token_ids == [4, 5]


def test_kept_tokens_are_a_copy() -> None:
    """vLLM cuts what follows a stop string off the output's own list (output_processor.py)."""
    made = flight()
    (output,) = streaming(made)
    del output.new_token_ids[1:]
    assert made.output_token_ids == [4, 5]


def test_first_output_carries_prefills_part_in_our_clock() -> None:
    """Queued when it came to the proxy, scheduled when prefill began, cached tokens as prefill says."""
    made = flight()
    late = EngineCoreEvent(SCHEDULED, 1009.0)
    (first,) = streaming(made, events=[late], prefill_stats=PrefillStats(2))
    (second,) = made.on_output("decode", decode_step(), OFFSET_S)
    assert [(e.type, e.timestamp) for e in first.events] == [(QUEUED, made.queued_s), (SCHEDULED, 5.0)]
    assert first.prefill_stats.num_cached_tokens == 1
    assert second.events is None


def test_next_attempt_has_a_new_id_and_what_was_passed_on() -> None:
    """And counts the tokens that its prefill computes; the bounce itself is not for the client."""
    made = flight()
    streaming(made, 4, 5)
    assert made.on_output("decode", bounced(Bounce.PREEMPTED), OFFSET_S) == []
    made.attempt_over()
    assert (made.attempt, made.next_leg_id, made.tokens) == (None, "ls-0-1-t2", 4)
    attempt = made.begin(*loads(), hand_off=False)
    assert (attempt.leg_id, attempt.number, attempt.tokens) == ("ls-0-1-t2", 2, 4)
    assert [a.reason for a in made.attempts] == [AttemptReason.FIRST, AttemptReason.PREEMPTED]
    (output,) = streaming(made, 6, finish_reason=FinishReason.STOP)
    assert (output.new_token_ids, output.finish_reason) == ([6], FinishReason.STOP)
    assert made.output_token_ids == [4, 5, 6]


def test_later_attempt_is_neither_queued_nor_prefilled_again() -> None:
    """To the front end there is one request: no second prefill and no second arrival, but a preemption."""
    made = flight()
    streaming(made)
    again(made)
    events = [EngineCoreEvent(QUEUED, 1010.0), EngineCoreEvent(SCHEDULED, 1011.0)]
    (output,) = streaming(made, events=events, prefill_stats=PrefillStats(4))
    assert types(output) == [PREEMPTED]
    assert output.prefill_stats is None
    assert output.new_prompt_logprobs_tensors is None
    assert made.on_output("decode", decode_step(), OFFSET_S)[0].events is None


def test_first_tokens_of_a_second_attempt_carry_prefills_part() -> None:
    """When the first one ended before it had any: scheduled is when prefill first began."""
    made = flight()
    made.on_output("prefill", prefill_end(), OFFSET_S)
    again(made)
    (output,) = streaming(made)
    assert [(e.type, e.timestamp) for e in output.events[:2]] == [(QUEUED, made.queued_s), (SCHEDULED, 5.0)]
    assert types(output)[2:] == [PREEMPTED]
    assert output.prefill_stats.num_cached_tokens == 1


@pytest.mark.parametrize(
    ("bounce", "told", "counted"),
    [(Bounce.PREEMPTED, False, 1), (Bounce.PREEMPTED, True, 1), (Bounce.KV_LOAD_FAILED, False, 0)],
)
def test_preemption_is_counted_once(bounce: Bounce, told: bool, counted: int) -> None:
    """Whether decode's last tokens came with the event or not; no other end is one."""
    made = flight()
    outputs = streaming(made)
    outputs += made.on_output(
        "decode", decode_step(events=[EngineCoreEvent(PREEMPTED, 1012.0)] if told else None), OFFSET_S
    )
    again(made, bounce)
    outputs += streaming(made)
    outputs += made.on_output("decode", decode_step(), OFFSET_S)
    assert sum(types(output).count(PREEMPTED) for output in outputs) == counted


def test_failed_ranks_are_noted_with_their_attempt() -> None:
    """The rank alone when it failed, all of the node's when the node refused or was lost."""
    made = flight(num_ranks=2)
    made.on_output("decode", bounced(Bounce.KV_LOAD_FAILED), OFFSET_S)
    made.attempt_over()
    assert made.failed_at == {("p", 0): 1, ("d", 0): 1}
    made.begin(*loads(num_ranks=2), hand_off=False).on_loss("decode")
    made.attempt_over()
    assert made.failed_at == {("p", 0): 1, ("d", 0): 2, ("d", 1): 2}


def test_stall_is_counted_from_the_first_of_several_ends() -> None:
    """It is what the client waits."""
    made = flight()
    streaming(made)
    again(made)
    began = made.stalled_s
    again(made)
    assert began is not None
    assert made.stalled_s == began


def test_log_names_every_step() -> None:
    """Of each attempt; one that was not reached has no number."""
    made = flight()
    assert "dispatched_ms=-" not in flight_log.timings(made)
    assert "first_token_ms=-" in flight_log.timings(made)
    assert "_t2" not in flight_log.timings(made)
    streaming(made)
    again(made)
    text = flight_log.timings(made)
    assert "first_token_ms=-" not in text
    assert "dispatched_t2_ms=-" not in text
    assert "token_t2_ms=-" in text
    assert "finished_ms=" in text
