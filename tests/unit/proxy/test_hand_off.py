"""What the proxy decides of a first token: held back or passed on, and whether the answer ends with it."""

from typing import Any

import pytest
from unit.proxy.attempts_for_tests import (
    FRONT_ID,
    OFFSET_S,
    decode_step,
    early_token,
    flight,
    prefill_end,
    request,
)
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, FinishReason

from kv_transfer.params import PrefillPeer
from proxy import legs
from proxy.hand_off import end_of, held_back_because
from proxy.metrics import HandOffOutcome

OURS = "decode_node.scheduler.LockstepScheduler"


@pytest.mark.parametrize(
    ("params", "scheduler", "enabled", "why"),
    [
        ({}, OURS, True, None),
        ({"seed": 1, "temperature": 0}, OURS, True, None),
        ({"seed": 1, "temperature": 1}, OURS, True, HandOffOutcome.SEED),
        ({}, "kv_transfer.carried.vllm_schedulers.CarriedAsyncScheduler", True, "decode_scheduler"),
        ({}, OURS, False, HandOffOutcome.OFF),
    ],
)
def test_held_back(params: dict[str, Any], scheduler: str, enabled: bool, why: str | None) -> None:
    """Only where decode would not go on exactly; greedy sampling draws nothing from a seed."""
    assert held_back_because(SamplingParams(**params), scheduler, enabled=enabled) == why


def stops_at(token: int, **params: Any) -> SamplingParams:
    made = SamplingParams(**params)
    made._eos_token_id = token
    return made


@pytest.mark.parametrize(
    ("params", "output", "end"),
    [
        (stops_at(2), [1], (None, None)),
        (stops_at(2), [1, 2], (FinishReason.STOP, None)),
        (SamplingParams(stop_token_ids=[5]), [5], (FinishReason.STOP, 5)),
        (SamplingParams(max_tokens=2), [7, 8], (FinishReason.LENGTH, None)),
        (SamplingParams(max_tokens=2), [7], (None, None)),
        (
            SamplingParams(
                max_tokens=50,
                repetition_detection=RepetitionDetectionParams(
                    max_pattern_size=1, min_pattern_size=1, min_count=3
                ),
            ),
            [4, 4, 4],
            (FinishReason.REPETITION, "repetition_detected"),
        ),
    ],
)
def test_end_of(params: SamplingParams, output: list[int], end: tuple[Any, Any]) -> None:
    """As vLLM's scheduler ends a request; with ignore_eos there is no such token (_eos_token_id is None)."""
    assert end_of(params, output) == end


def test_legs_are_told_and_prefill_samples_for_the_client() -> None:
    """With the client's logprobs; nothing may end the leg but its length."""
    asked = request(logprobs=2, stop_token_ids=[9])
    prefill = legs.prefill_leg(asked, "ls-0-1-t1", "a" * 32, hand_off=True).sampling_params
    assert (prefill.logprobs, prefill.stop_token_ids, prefill.max_tokens) == (2, [], 1)
    assert prefill.extra_args["kv_transfer_params"]["lockstep_hand_off"] is True
    peer = PrefillPeer("p", "h", 1, 1)
    decode = legs.decode_leg(asked, "ls-0-1-t1", peer, "a" * 32, hand_off=True).sampling_params
    assert decode.extra_args["kv_transfer_params"]["lockstep_hand_off"] is True
    assert decode.max_tokens == 40


def passed_on(**params: object) -> tuple[Any, list[EngineCoreOutput]]:
    made = flight(hand_off=True, **params)
    return made, made.on_output("prefill", prefill_end(), OFFSET_S)


def test_prefills_token_is_the_clients_first_output() -> None:
    """It goes on: no finish, first events and cached tokens with it; decode's outputs follow as they are."""
    made, (first,) = passed_on()
    assert (first.request_id, first.new_token_ids, first.finish_reason) == (FRONT_ID, [9], None)
    assert [event.type for event in first.events] == [
        EngineCoreEventType.QUEUED,
        EngineCoreEventType.SCHEDULED,
    ]
    assert first.prefill_stats.num_cached_tokens == 1
    (second,) = made.on_output("decode", decode_step(), OFFSET_S)
    assert (second.new_token_ids, second.events, second.prefill_stats) == ([4, 5], None, None)
    assert made.output_token_ids == [9, 4, 5]


def test_token_that_is_told_early_is_the_clients_first_output() -> None:
    """With its events and cached tokens; the leg's end adds nothing, and decode's outputs follow."""
    made = flight(hand_off=True)
    (first,) = made.on_output("prefill", early_token(), OFFSET_S)
    assert (first.request_id, first.new_token_ids, first.finish_reason) == (FRONT_ID, [9], None)
    assert [event.type for event in first.events] == [
        EngineCoreEventType.QUEUED,
        EngineCoreEventType.SCHEDULED,
    ]
    assert first.prefill_stats.num_cached_tokens == 1
    assert made.on_output("decode", decode_step(), OFFSET_S) == []
    (second,) = made.on_output("prefill", prefill_end(), OFFSET_S)
    assert (second.new_token_ids, second.events, second.prefill_stats) == ([4, 5], None, None)
    assert made.output_token_ids == [9, 4, 5]


@pytest.mark.parametrize("params", [{"max_tokens": 1}, {"stop_token_ids": [9]}], ids=str)
def test_answers_last_token_comes_with_its_end(params: dict[str, Any]) -> None:
    """It is not told early: the front end takes what follows an end for another answer."""
    made = flight(hand_off=True, **params)
    assert made.on_output("prefill", early_token(), OFFSET_S) == []
    (only,) = made.on_output("prefill", prefill_end(), OFFSET_S)
    assert only.new_token_ids == [9]
    assert only.finish_reason is not None


def test_next_attempt_carries_a_token_that_was_told_early() -> None:
    """Its prefill is lost before its leg ended."""
    made = flight(hand_off=True)
    made.on_output("prefill", early_token(), OFFSET_S)
    made.attempt.on_loss("prefill")
    made.attempt_over()
    assert (made.output_token_ids, made.tokens) == ([9], made.prompt_tokens + 1)


def test_decode_that_is_heard_of_first_waits() -> None:
    """The nodes' streams are not ordered among each other."""
    made = flight(hand_off=True)
    assert made.on_output("decode", decode_step(), OFFSET_S) == []
    outputs = made.on_output("prefill", prefill_end(), OFFSET_S)
    assert [output.new_token_ids for output in outputs] == [[9], [4, 5]]


def test_answer_ends_with_prefills_token() -> None:
    """What decode says of it is not needed, and not passed on."""
    made = flight(hand_off=True, stop_token_ids=[9])
    end = EngineCoreOutput("leg", [], finish_reason=FinishReason.STOP, stop_reason=9)
    assert made.on_output("decode", end, OFFSET_S) == []
    (only,) = made.on_output("prefill", prefill_end(), OFFSET_S)
    assert (only.new_token_ids, only.finish_reason, only.stop_reason) == ([9], FinishReason.STOP, 9)
    assert made.attempt.hand_off_ended


def test_prefill_is_needed_until_decode_is_heard_of() -> None:
    """Its token is with the client, its KV may not be with decode; the next attempt carries the token."""
    made, _ = passed_on()
    made.attempt.on_loss("prefill")
    assert made.attempt.end is not None
    made.attempt_over()
    assert made.tokens == made.prompt_tokens + 1
