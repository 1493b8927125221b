"""Derives the two legs of an attempt from vLLM's EngineCoreRequest, as pure functions."""

import copy
from collections.abc import Sequence
from typing import Any

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from kv_transfer.params import PrefillPeer, decode_leg_params, prefill_leg_params

KV_TRANSFER_PARAMS = "kv_transfer_params"


def prompt_tokens(request: EngineCoreRequest) -> int:
    """Length of the prompt in tokens, whether it came as ids or as embeddings."""
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return len(request.prompt_embeds)


def prefill_leg(
    request: EngineCoreRequest,
    leg_id: str,
    token: str,
    output_token_ids: Sequence[int] = (),
    *,
    hand_off: bool = False,
) -> EngineCoreRequest:
    """The request that computes the prompt and pushes its KV; it ends after one new token, by its length.

    `output_token_ids` is what earlier attempts generated: they travel apart from the prompt, and count as
    output on the node. Nothing may end the leg earlier or otherwise: the connector pushes only for a request
    that ended by its length (vLLM nixl/push_scheduler.py::request_finished). min_tokens still holds for the
    token it samples, and cannot exceed max_tokens (vLLM sampling_params.py::_verify_args). Prompt logprobs
    went out with the client's first token. With `hand_off` the token that it samples is the client's, and so
    are its logprobs.
    """
    params = copy.copy(request.sampling_params)
    params.max_tokens = len(output_token_ids) + 1
    params.min_tokens = min(params.min_tokens, params.max_tokens)
    params.stop = []
    params.output_text_buffer_length = 0
    params.stop_token_ids = []
    params.ignore_eos = True
    params._eos_token_id = None  # what the scheduler compares with (v1/core/sched/utils.py:105)
    params.repetition_detection = None
    if not hand_off:
        params.logprobs = None
        params.logprob_token_ids = None
    if output_token_ids:
        _ask_no_prompt_logprobs(params)
    return _leg(request, leg_id, params, prefill_leg_params(token, output_token_ids, hand_off=hand_off))


def decode_leg(
    request: EngineCoreRequest,
    leg_id: str,
    peer: PrefillPeer,
    token: str,
    output_token_ids: Sequence[int] = (),
    *,
    hand_off: bool = False,
) -> EngineCoreRequest:
    """The request that waits for the KV and generates the tokens that the client sees.

    With `hand_off` it goes on from prefill's first one, and generates what follows.

    Its limits stay the client's: `output_token_ids` count as output on the node. It never asks for prompt
    logprobs: with them vLLM ignores the transferred KV and computes the whole prompt again
    (v1/core/sched/scheduler.py:983, through `skip_reading_prefix_cache`).
    """
    params = copy.copy(request.sampling_params)
    _ask_no_prompt_logprobs(params)
    transfer = decode_leg_params(peer, leg_id, token, output_token_ids, hand_off=hand_off)
    return _leg(request, leg_id, params, transfer)


def _ask_no_prompt_logprobs(params: SamplingParams) -> None:
    params.prompt_logprobs = None
    params.prompt_logprob_token_ids = None
    params.prompt_logprob_start = None
    params.skip_reading_prefix_cache = False


def _leg(
    request: EngineCoreRequest, leg_id: str, params: SamplingParams, transfer: dict[str, Any]
) -> EngineCoreRequest:
    """Put a leg together. The original is shared with vLLM's output processor, so it is never changed.

    The client's own id and the rank it asked for stay in the proxy: nodes know only our id and our choice.
    """
    params.extra_args = {**(params.extra_args or {}), KV_TRANSFER_PARAMS: transfer}
    return msgspec.structs.replace(
        request, request_id=leg_id, sampling_params=params, external_req_id=None, data_parallel_rank=None
    )
