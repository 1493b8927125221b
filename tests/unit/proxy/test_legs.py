"""The two legs of a request, as derived from what vLLM's front end built."""

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from kv_transfer.params import PrefillPeer, new_token, parse_decode_leg, parse_prefill_leg
from lockstep.rpc import codec
from proxy import legs

TOKEN = new_token()
LEG_ID = "ls-0a-1-t1"
PEER = PrefillPeer("engine-1_dp0", "10.0.0.2", 5600, 1)
EOS = 1


def request(**params: object) -> EngineCoreRequest:
    sampling = SamplingParams(**{"max_tokens": 40, **params})
    sampling.update_from_generation_config({}, EOS)
    return EngineCoreRequest(
        request_id="cmpl-x-12345678",
        prompt_token_ids=[5, 6, 7],
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=1.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=1,
        external_req_id="cmpl-x",
    )


def sent(leg: EngineCoreRequest) -> SamplingParams:
    """As the node reads it, vLLM's own checks passed."""
    params = codec.decode_request(codec.encode_request(leg)).sampling_params
    assert params is not None
    return params


def both(original: EngineCoreRequest) -> tuple[EngineCoreRequest, EngineCoreRequest]:
    return legs.prefill_leg(original, LEG_ID, TOKEN), legs.decode_leg(original, LEG_ID, PEER, TOKEN)


def test_legs_pass_the_nodes_checks_with_one_id_and_token() -> None:
    """Each parses as its own role, and they name each other."""
    prefill, decode = both(request())
    assert prefill.request_id == decode.request_id == LEG_ID
    assert parse_prefill_leg(sent(prefill).extra_args["kv_transfer_params"]).token == TOKEN
    parsed = parse_decode_leg(sent(decode).extra_args["kv_transfer_params"], LEG_ID)
    assert (parsed.peer, parsed.token) == (PEER, TOKEN)


def test_original_is_not_changed() -> None:
    """vLLM's output processor keeps using it."""
    original = request(stop=["x"], prompt_logprobs=2, min_tokens=3, extra_args={"a": 1})
    before = codec.encode_request(original)
    both(original)
    assert codec.encode_request(original) == before


@pytest.mark.parametrize(("asked", "given"), [(0, 0), (1, 1), (20, 1)])
def test_prefill_leg_samples_one_token(asked: int, given: int) -> None:
    """min_tokens holds for that token and never exceeds it, or the node could not even decode the request."""
    params = sent(legs.prefill_leg(request(min_tokens=asked), LEG_ID, TOKEN))
    assert (params.max_tokens, params.min_tokens) == (1, given)


def test_carried_tokens_travel_apart_from_the_prompt() -> None:
    """On both legs; prefill samples one more token, and decode's limits still count from the first."""
    original = request(max_tokens=9, min_tokens=6)
    prefill = legs.prefill_leg(original, LEG_ID, TOKEN, [8, 9])
    decode = legs.decode_leg(original, LEG_ID, PEER, TOKEN, [8, 9])
    for leg in (prefill, decode):
        assert leg.prompt_token_ids == [5, 6, 7]
    assert parse_prefill_leg(sent(prefill).extra_args["kv_transfer_params"]).output_token_ids == (8, 9)
    assert parse_decode_leg(sent(decode).extra_args["kv_transfer_params"], LEG_ID).output_token_ids == (8, 9)
    assert (sent(prefill).max_tokens, sent(prefill).min_tokens) == (3, 3)
    assert (sent(decode).max_tokens, sent(decode).min_tokens) == (9, 6)


def test_prompt_logprobs_are_asked_for_only_before_the_first_token() -> None:
    """Later the client has them, and vLLM would not use its prefix cache."""
    original = request(prompt_logprobs=2, prompt_logprob_token_ids=np.array([[1], [2]]))
    later = sent(legs.prefill_leg(original, LEG_ID, TOKEN, [8]))
    assert (later.prompt_logprobs, later.prompt_logprob_token_ids) == (None, None)
    assert not later.skip_reading_prefix_cache


def test_prefill_leg_can_only_end_by_length() -> None:
    """The connector pushes nothing for another end: no eos, stop token, stop string or repetition ends it."""
    params = sent(legs.prefill_leg(request(stop_token_ids=[9], stop=["a"]), LEG_ID, TOKEN))
    assert params.eos_token_id is None
    assert params.ignore_eos
    assert not params.stop_token_ids
    assert not params.stop
    assert params.repetition_detection is None


def test_decode_leg_keeps_the_clients_limits() -> None:
    """All that the client sees comes from it."""
    params = sent(
        legs.decode_leg(request(min_tokens=3, stop_token_ids=[9], seed=4, logprobs=2), LEG_ID, PEER, TOKEN)
    )
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (40, 3, 4, 2)
    assert params.eos_token_id == EOS
    assert params.stop_token_ids == [9]


def test_decode_leg_never_asks_for_prompt_logprobs() -> None:
    """vLLM would ignore the transferred KV and compute the prompt again, also through the flag set by it."""
    original = request(prompt_logprobs=2)
    prefill, decode = (sent(leg) for leg in both(original))
    assert (prefill.prompt_logprobs, decode.prompt_logprobs) == (2, None)
    assert prefill.skip_reading_prefix_cache
    assert not decode.skip_reading_prefix_cache


def test_scored_prompt_tokens_stay_on_prefill() -> None:
    """The other parameter that makes vLLM recompute a prompt."""
    original = request(prompt_logprob_token_ids=np.array([[1], [2]]))
    assert legs.decode_leg(original, LEG_ID, PEER, TOKEN).sampling_params.prompt_logprob_token_ids is None


def test_nodes_do_not_learn_the_clients_id_or_rank() -> None:
    """Nothing there may be keyed by what a client chose."""
    for leg in both(request()):
        assert leg.external_req_id is None
        assert leg.data_parallel_rank is None


def test_other_extra_arguments_go_along() -> None:
    """vLLM's own plug-ins may read them."""
    for leg in both(request(extra_args={"a": 1})):
        assert sent(leg).extra_args["a"] == 1
