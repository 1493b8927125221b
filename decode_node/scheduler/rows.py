"""What a scheduled row is made of: its drafts, its placeholders, and why it has another width than 1 + K."""

from enum import StrEnum
from typing import Any

PLACEHOLDER = -1
"""A draft that nobody proposed. The V1 runner embeds it as token 0 and always rejects it
(vllm/v1/worker/gpu_model_runner.py:3308)."""


class Violation(StrEnum):
    """Why a row broke the rule of 1 + K tokens."""

    UNPADDED_ARRIVAL = "unpadded_arrival"
    """A first row without placeholders."""
    SHORT_DRAFTS = "short_drafts"
    """A later row with fewer than K drafts."""
    CONTEXT_LIMIT = "context_limit"
    """Cut off at the engine's max_model_len."""
    LOCAL_PREFILL = "local_prefill"
    """More than one known token to compute."""


def violation_of(
    request: Any, num_scheduled_tokens: int, *, width: int, max_model_len: int, arrived: bool
) -> Violation | None:
    """Judge one row after `schedule()` has counted it into `request.num_computed_tokens`.

    Args:
        request: vLLM's `Request`; under asynchronous scheduling its known tokens may lag behind.
        num_scheduled_tokens: of this row.
        width: 1 + K.
        max_model_len: the engine's own.
        arrived: whether this is the request's first row.
    """
    num_computed_tokens = request.num_computed_tokens - num_scheduled_tokens
    if num_computed_tokens < request.num_tokens - 1:
        return Violation.LOCAL_PREFILL
    if num_scheduled_tokens == width:
        return None
    # vLLM leaves room for the sampled token too (vllm/v1/core/sched/scheduler.py:716).
    if max_model_len - num_computed_tokens - 1 < width:
        return Violation.CONTEXT_LIMIT
    return Violation.UNPADDED_ARRIVAL if arrived else Violation.SHORT_DRAFTS


def fill_drafts(scheduler_output: Any, num_speculative_tokens: int) -> None:
    """Give every row of 1 + K tokens K drafts, placeholders where there are too few; in place."""
    drafts = scheduler_output.scheduled_spec_decode_tokens
    for request_id, num_scheduled_tokens in scheduler_output.num_scheduled_tokens.items():
        known = drafts.get(request_id, ())
        missing = num_speculative_tokens - len(known)
        if missing > 0 and num_scheduled_tokens == 1 + num_speculative_tokens:
            drafts[request_id] = [*known, *[PLACEHOLDER] * missing]


def unpad_arrivals(scheduler_output: Any) -> None:
    """Take the placeholders from first rows again, in place: 1 token each, as vLLM did before it padded."""
    drafts = scheduler_output.scheduled_spec_decode_tokens
    for new_request in scheduler_output.scheduled_new_reqs:
        if num_drafts := len(drafts.pop(new_request.req_id, ())):
            scheduler_output.num_scheduled_tokens[new_request.req_id] -= num_drafts
            scheduler_output.total_num_scheduled_tokens -= num_drafts


def count_placeholders(scheduler_output: Any, *, drafts_on_worker: bool) -> dict[str, int]:
    """Number of drafts, by request, that nobody proposed; requests without any are left out.

    With `drafts_on_worker` (asynchronous scheduling) the scheduler never sees drafts. The worker then has
    those of the rows that it also ran in the step before, and of no others: vLLM sends `all_token_ids` for
    exactly the rest (scheduler.py `_make_cached_request_data`).
    """
    drafts = scheduler_output.scheduled_spec_decode_tokens
    if drafts_on_worker:
        without = [new_request.req_id for new_request in scheduler_output.scheduled_new_reqs]
        without += scheduler_output.scheduled_cached_reqs.all_token_ids
    else:
        without = list(drafts)
    counts = {request_id: drafts.get(request_id, []).count(PLACEHOLDER) for request_id in without}
    return {request_id: count for request_id, count in counts.items() if count}
