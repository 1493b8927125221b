"""What the front end gets of the two legs' outputs, and when."""

import pytest
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

from lockstep.errors import InternalError, KVTransferError
from proxy.flight import Flight, Phase
from proxy.routing import RankLoad

OFFSET_S = -1000.0


def flight() -> Flight:
    """A dispatched one."""
    request = EngineCoreRequest(
        "cmpl-a-12345678", [1, 2], None, SamplingParams(), None, 0.0, None, None, None
    )
    made = Flight("cmpl-a-12345678", request, "ls-0-1-t1", 2)
    prefill, decode = node("prefill", "p"), node("decode", "d")
    made.dispatched(RankLoad(prefill, prefill.ranks[0], 1), RankLoad(decode, decode.ranks[0], 1))
    return made


def prefill_end(reason: FinishReason = FinishReason.LENGTH) -> EngineCoreOutput:
    event = EngineCoreEvent(EngineCoreEventType.SCHEDULED, 1005.0)
    return EngineCoreOutput(
        "ls-0-1-t1", [9], finish_reason=reason, events=[event], prefill_stats=PrefillStats(2, 1, 1, 1)
    )


def decode_step(**fields: object) -> EngineCoreOutput:
    return EngineCoreOutput("ls-0-1-t1", [4, 5], kv_transfer_params={"secret": 1}, **fields)


def test_prefills_own_output_is_not_for_the_client() -> None:
    """Neither its token nor its finish."""
    made = flight()
    assert made.on_prefill(prefill_end(), OFFSET_S) == []
    assert made.phase is Phase.PREFILLED


def test_decode_outputs_go_out_under_the_front_ends_id() -> None:
    """Without what the nodes agreed between them."""
    made = flight()
    made.on_prefill(prefill_end(), OFFSET_S)
    (output,) = made.on_decode(decode_step(), OFFSET_S)
    assert (output.request_id, output.new_token_ids) == ("cmpl-a-12345678", [4, 5])
    assert output.kv_transfer_params is None
    assert made.phase is Phase.STREAMING
    assert made.output_tokens == 2


def test_decode_that_overtakes_prefill_is_held_in_order() -> None:
    """The two nodes' streams are not ordered; nothing is lost and nothing comes twice."""
    made = flight()
    assert made.on_decode(decode_step(), OFFSET_S) == []
    assert made.on_decode(decode_step(finish_reason=FinishReason.STOP), OFFSET_S) == []
    first, last = made.on_prefill(prefill_end(), OFFSET_S)
    assert (first.finish_reason, last.finish_reason) == (None, FinishReason.STOP)
    assert made.output_tokens == 4


def test_first_output_carries_prefills_part_in_our_clock() -> None:
    """Queued when it came to the proxy, scheduled when prefill began, cached tokens as prefill says."""
    made = flight()
    made.on_prefill(prefill_end(), OFFSET_S)
    late = EngineCoreEvent(EngineCoreEventType.SCHEDULED, 1009.0)
    (first,) = made.on_decode(decode_step(events=[late], prefill_stats=PrefillStats(2)), OFFSET_S)
    (second,) = made.on_decode(decode_step(), OFFSET_S)
    assert [(e.type, e.timestamp) for e in first.events] == [
        (EngineCoreEventType.QUEUED, made.queued_s),
        (EngineCoreEventType.SCHEDULED, 5.0),
    ]
    assert first.prefill_stats.num_cached_tokens == 1
    assert second.events is None


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR, FinishReason.STOP])
def test_prefill_must_end_by_length(reason: FinishReason) -> None:
    """Any other end means that nothing is pushed."""
    with pytest.raises(InternalError):
        flight().on_prefill(prefill_end(reason), OFFSET_S)


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_bad_end_of_decode_before_and_after_the_first_token(reason: FinishReason) -> None:
    """Before it, the KV did not arrive; after it, something else broke. Neither is an end for the client."""
    made = flight()
    with pytest.raises(KVTransferError):
        made.on_decode(decode_step(finish_reason=reason), OFFSET_S)
    made.on_prefill(prefill_end(), OFFSET_S)
    made.on_decode(decode_step(), OFFSET_S)
    with pytest.raises(InternalError):
        made.on_decode(decode_step(finish_reason=reason), OFFSET_S)


def test_timings_name_every_step() -> None:
    """One that was not reached has no number."""
    made = flight()
    assert "dispatched_ms=-" not in made.timings()
    assert "finished_ms=" in made.timings()
    assert "first_token_ms=-" in made.timings()
