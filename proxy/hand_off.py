"""What the proxy decides of a hand-off: whether a first token is passed on, and if the answer ends there."""

import sys
from collections.abc import Sequence
from typing import Any

from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from proxy.metrics import HandOffOutcome

_STOCK_SCHEDULERS = "kv_transfer.carried.vllm_schedulers."


def held_back_because(
    params: SamplingParams, decode_scheduler: str, *, enabled: bool
) -> HandOffOutcome | None:
    """None if decode goes on exactly from the token that prefill samples.

    `decode_scheduler`: the class, as the node describes it; vLLM's own does not take a token over.

    A request with a seed has a random generator of its own, and each engine starts it anew
    (v1/worker/gpu_model_runner.py:1254).
    """
    if not enabled:
        return HandOffOutcome.OFF
    if decode_scheduler.startswith(_STOCK_SCHEDULERS):
        return HandOffOutcome.DECODE_SCHEDULER
    return HandOffOutcome.SEED if params.sampling_type == SamplingType.RANDOM_SEED else None


class _Answer:
    """What vLLM's `check_stop` reads and writes of a request."""

    pooling_params = None

    def __init__(self, params: SamplingParams, output_token_ids: Sequence[int]) -> None:
        self.sampling_params = params
        self.output_token_ids = output_token_ids
        self.num_output_tokens = len(output_token_ids)
        self.num_tokens = self.num_output_tokens
        self.max_tokens = params.max_tokens
        self.status = RequestStatus.RUNNING
        self.stop_reason: int | str | None = None


def end_of(
    params: SamplingParams, output_token_ids: Sequence[int]
) -> tuple[FinishReason | None, int | str | None]:
    """(finish reason, stop reason) of the answer as of its last token, by vLLM's own rule; (None, None) if it
    goes on.

    The context limit is not looked at: the front end has cut max_tokens to what it leaves.
    """
    answer: Any = _Answer(params, output_token_ids)
    if not check_stop(answer, sys.maxsize):
        return None, None
    return RequestStatus.get_finished_reason(answer.status), answer.stop_reason
