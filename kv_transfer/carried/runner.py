"""The model runner's part of carried tokens (V1): its state of a new request starts with them.

vLLM's scheduler sends no output tokens with a new request (v1/core/sched/output.py, `NewRequestData`), and
the V1 runner starts each with an empty list (v1/worker/gpu_model_runner.py:1275). V2 gets all by itself.
"""

import functools
from typing import Any

from kv_transfer.params import carried_output_token_ids

_MARK = "__lockstep_carried__"


def register() -> None:
    """Entry point of `vllm.general_plugins`; safe to run more than once.

    The dataclass keeps its name and place: the modules that import it by name may be loaded already.
    """
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    stock = CachedRequestState.__post_init__
    if hasattr(stock, _MARK):
        return

    @functools.wraps(stock)
    def post_init(state: Any) -> None:
        stock(state)
        _take_carried(state)

    setattr(post_init, _MARK, True)
    CachedRequestState.__post_init__ = post_init


def _take_carried(state: Any) -> None:
    """Fill in the output tokens of a `CachedRequestState` that is made for a new request."""
    params = state.sampling_params
    if params is not None and params.extra_args and not state.output_token_ids:
        state.output_token_ids.extend(carried_output_token_ids(params.extra_args.get("kv_transfer_params")))
