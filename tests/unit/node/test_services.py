"""Each role takes its own leg and refuses the other's, and plain requests."""

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from decode_node.service import ROLE as DECODE
from kv_transfer.params import (
    OUTPUT_TOKEN_IDS_KEY,
    PrefillPeer,
    decode_leg_params,
    new_token,
    prefill_leg_params,
)
from lockstep.errors import WrongLegError
from lockstep.node.role import Role
from prefill_node.service import ROLE as PREFILL

REQUEST_ID = "ls-abc-1-a1"
PEER = PrefillPeer("engine", "10.0.0.1", 5600, 1)
PREFILL_PARAMS = prefill_leg_params(new_token())
DECODE_PARAMS = decode_leg_params(PEER, REQUEST_ID, new_token())


def request(kv_transfer_params: dict[str, Any] | None, **sampling: Any) -> EngineCoreRequest:
    extra = {"kv_transfer_params": kv_transfer_params} if kv_transfer_params is not None else None
    return EngineCoreRequest(
        request_id=REQUEST_ID,
        prompt_token_ids=[1, 2],
        mm_features=None,
        sampling_params=SamplingParams(extra_args=extra, **sampling),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def test_each_role_takes_its_own_leg() -> None:
    PREFILL.check_request(request(PREFILL_PARAMS, max_tokens=1))
    DECODE.check_request(request(DECODE_PARAMS, max_tokens=20))


@pytest.mark.parametrize(
    ("role", "params", "sampling"),
    [
        (PREFILL, DECODE_PARAMS, {"max_tokens": 1}),
        (PREFILL, PREFILL_PARAMS, {"max_tokens": 2}),
        (PREFILL, None, {"max_tokens": 1}),
        (DECODE, PREFILL_PARAMS, {}),
        (DECODE, None, {}),
        (DECODE, DECODE_PARAMS, {"prompt_logprobs": 1}),
        (DECODE, DECODE_PARAMS | {"remote_request_id": "ls-abc-2-a1"}, {}),
        (DECODE, DECODE_PARAMS | {"do_remote_decode": True}, {}),
        (DECODE, DECODE_PARAMS | {OUTPUT_TOKEN_IDS_KEY: [7, 8]}, {"max_tokens": 2}),
    ],
)
def test_other_work_is_refused(role: Role, params: dict[str, Any] | None, sampling: dict[str, Any]) -> None:
    """A decode rank that took plain work would run a prefill and drag its group."""
    with pytest.raises(WrongLegError):
        role.check_request(request(params, **sampling))


@pytest.mark.parametrize("carried", [[-1], "ab", [1.5], [True]])
def test_bad_carried_tokens_are_refused_by_their_name(carried: Any) -> None:
    """They would end up in the model's input."""
    params = DECODE_PARAMS | {OUTPUT_TOKEN_IDS_KEY: carried}
    with pytest.raises(WrongLegError, match=OUTPUT_TOKEN_IDS_KEY) as raised:
        DECODE.check_request(request(params, max_tokens=20))
    assert raised.value.param == "kv_transfer_params"


def test_decode_goes_on_from_carried_tokens() -> None:
    """As long as one more may come."""
    params = decode_leg_params(PEER, REQUEST_ID, new_token(), [7, 8])
    DECODE.check_request(request(params, max_tokens=3))
