"""What a prefill node takes of a leg that carries tokens."""

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from kv_transfer.params import new_token, prefill_leg_params
from lockstep.errors import WrongLegError
from prefill_node.service import ROLE

CARRIED = [7, 8, 9]


def leg(carried: Any, **sampling: Any) -> EngineCoreRequest:
    transfer = prefill_leg_params(new_token()) | {"lockstep_output_token_ids": carried}
    return EngineCoreRequest(
        request_id="ls-abc-1-a2",
        prompt_token_ids=[1, 2],
        mm_features=None,
        sampling_params=SamplingParams(extra_args={"kv_transfer_params": transfer}, **sampling),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def test_a_leg_makes_one_token_more_than_it_carries() -> None:
    ROLE.check_request(leg(CARRIED, max_tokens=4, min_tokens=4))


@pytest.mark.parametrize(
    ("carried", "sampling", "param"),
    [
        (CARRIED, {"max_tokens": 1}, "max_tokens"),
        (CARRIED, {"max_tokens": 3}, "max_tokens"),
        (CARRIED, {"max_tokens": 5}, "max_tokens"),
        (CARRIED, {"max_tokens": 4, "prompt_logprobs": 1}, "prompt_logprobs"),
        (["7"], {"max_tokens": 2}, None),
    ],
)
def test_other_legs_are_refused(carried: Any, sampling: dict[str, Any], param: str | None) -> None:
    """The error names the parameter."""
    with pytest.raises(WrongLegError) as refused:
        ROLE.check_request(leg(carried, **sampling))
    assert refused.value.param == param
