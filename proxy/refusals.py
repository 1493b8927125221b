"""Refuses, before vLLM's front end registers it, a request that no node would take."""

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from lockstep.errors import InvalidRequestError
from lockstep.node import support


def refused_field(
    prompt: Any, params: SamplingParams | PoolingParams, lora_request: object | None
) -> str | None:
    """The field of EngineCoreRequest that AsyncLLM.add_request would fill from these and is not served.

    `prompt` is what vLLM's serving layer passes on: an input with a type (vllm/inputs/engine.py), a raw
    prompt, or a generator for streaming input.
    """
    if isinstance(params, PoolingParams):
        return "pooling_params"
    if lora_request is not None:
        return "lora_request"
    if isinstance(prompt, AsyncGenerator):
        return "resumable"
    if isinstance(prompt, dict):
        if prompt.get("type") == "embeds" or prompt.get("prompt_embeds") is not None:
            return "prompt_embeds"
        if prompt.get("type") == "multimodal" or prompt.get("multi_modal_data"):
            return "mm_features"
    return None


def check(prompt: Any, params: SamplingParams | PoolingParams, lora_request: object | None) -> None:
    """Raises InvalidRequestError naming the field; its text is the node's own."""
    if isinstance(prompt, EngineCoreRequest):
        support.check_request(prompt)
    field = refused_field(prompt, params, lora_request)
    if field is not None:
        raise InvalidRequestError(support.REQUEST_FIELDS[field], field)
    if isinstance(params, SamplingParams):
        _check_text(params)


def _check_text(params: SamplingParams) -> None:
    """What a client may fill freely has to fit on the wire: JSON escapes can name half a character.

    That numbers fit, vLLM checks (sampling_params.py, `_verify_extra_args`).
    """
    for field in ("stop", "bad_words", "extra_args"):
        try:
            msgspec.msgpack.encode(getattr(params, field))
        except UnicodeEncodeError:
            raise InvalidRequestError(f"{field} has text that is not valid Unicode.", field) from None
