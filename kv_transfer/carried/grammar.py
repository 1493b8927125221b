"""The grammar's part of carried tokens: it is advanced by them as generation would have advanced it."""

import math
from typing import Any

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.request import StructuredOutputRequest

# vLLM drops INFO of loggers outside its own name.
logger = init_logger(f"vllm.{__name__}")

MAX_PIECES = 256
"""Reasoning parsers may read all tokens so far for each piece, and the engine waits meanwhile."""


class _GeneratedSoFar:
    """What `StructuredOutputManager.accept_tokens` reads of a request, as it was after some of its output.

    Attributes:
        all_token_ids: the prompt and the output up to and with the tokens that are accepted next.
        structured_output_request: the request's own; whether its reasoning has ended is kept there.
    """

    def __init__(self, request: Any) -> None:
        self.request_id: str = request.request_id
        self.prompt_token_ids: list[int] | None = request.prompt_token_ids
        self.structured_output_request = request.structured_output_request
        self.use_structured_output = True
        self.all_token_ids: list[int] = request.all_token_ids[: request.num_prompt_tokens]


def replay(manager: Any, request: Any) -> None:
    """Advance the request's grammar by its output tokens, if the grammar is there; call once when it is.

    `manager` is the engine's StructuredOutputManager. Its `accept_tokens` decides for each piece, as for the
    output of a step, where reasoning ends and the grammar begins (v1/structured_output/__init__.py:462). A
    token that the grammar rejects fails the request, as it would have in generation.
    """
    compiled = request.structured_output_request.grammar
    if compiled is None or isinstance(compiled, Exception):
        return
    tokens = list(request.output_token_ids)
    size = math.ceil(len(tokens) / MAX_PIECES)
    so_far = _GeneratedSoFar(request)
    for start in range(0, len(tokens), size):
        piece = tokens[start : start + size]
        so_far.all_token_ids.extend(piece)
        if not manager.accept_tokens(so_far, piece):
            fail(request, f"the grammar rejects carried tokens {piece} after {start} others")
            return


def fail(request: Any, reason: str) -> None:
    """Make the scheduler end a request that waits, with FINISHED_ERROR, before it is ever scheduled.

    vLLM does that for a grammar that did not compile (v1/core/sched/scheduler.py:3204).
    """
    logger.error("Request %s cannot continue: %s", request.request_id, reason)
    params = request.sampling_params.structured_outputs
    request.structured_output_request = StructuredOutputRequest(params, ValueError(reason))
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
