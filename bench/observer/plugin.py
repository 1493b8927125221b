"""Owns what is noted inside an engine process: each agreement of its rank with the others, and each arrival.

The benchmark installs a copy of this file as a vLLM general plugin beside the systems under test
(`install.py`), so that a Lockstep node and a plain vLLM server are counted alike, by none of their own code.
It imports nothing of this repository. One line of JSON for each event goes to
AGREEMENT_OBSERVER_DIR/rank<rank>-<pid>.jsonl:

    ["a", who, when, own, padded, mode, agreed_mode, agreed_padded]    an agreement, in order
    ["new", request_id, computed, scheduled, drafts, placeholders]     a request's first step on this rank
    ["resumed", request_id, computed, scheduled, drafts, placeholders] one that was preempted and goes on here
    ["odd", {request_id: scheduled}]                                   a row of the step is not 1 + K wide
    ["preempted", number]

`who` is "target", "draft" or "context"; `when` is "work", "idle" (a dummy step for the peers) or "startup".
"""

import functools
import json
import os
import sys
from typing import Any

DIRECTORY_ENV = "AGREEMENT_OBSERVER_DIR"
MOST_FRAMES = 30
"""From the agreement up to the worker's own method there are about a dozen."""

_files: dict[int, int] = {}


def register() -> None:
    """Entry point of `vllm.general_plugins`; safe to run more than once."""
    if DIRECTORY_ENV not in os.environ:
        return
    from vllm.v1.worker import dp_utils
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    # All callers of the agreement reach it through this one name of its own module (dp_utils.py:246), below
    # them and above what moves the numbers between the ranks.
    dp_utils._synchronize_dp_ranks = _observed_agreement(dp_utils._synchronize_dp_ranks)
    GPUModelRunner.execute_model = _observed_step(GPUModelRunner.execute_model)


def _observed_agreement(agree: Any) -> Any:
    if hasattr(agree, "__wrapped__"):
        return agree

    @functools.wraps(agree)
    def observed(
        num_tokens_unpadded: int,
        num_tokens_padded: int,
        should_attempt_ubatching: bool,
        cudagraph_mode: int,
        parallel_config: Any,
    ) -> Any:
        agreed = agree(
            num_tokens_unpadded, num_tokens_padded, should_attempt_ubatching, cudagraph_mode, parallel_config
        )
        _, padded_of_ranks, agreed_mode = agreed
        who, when = _caller()
        event = ["a", who, when, num_tokens_unpadded, num_tokens_padded, int(cudagraph_mode)]
        _write(parallel_config.data_parallel_rank, [*event, int(agreed_mode), padded_of_ranks.tolist()])
        return agreed

    return observed


def _caller() -> tuple[str, str]:
    """Which model the agreement is for, and what the rank is doing, as the calling functions tell."""
    frame: Any = sys._getframe(3)  # past `observed` and `coordinate_batch_across_dp`
    module = str(frame.f_globals.get("__name__", ""))
    who = "draft" if ".spec_decode." in module else "target" if "model_runner" in module else "context"
    when = "work"
    for _ in range(MOST_FRAMES):
        name = frame.f_code.co_name
        if name == "execute_dummy_batch":
            return who, "idle"
        if name == "_dummy_run":
            when = "startup"
        frame = frame.f_back
        if frame is None or name == "execute_model":
            break
    return who, when


def _observed_step(execute: Any) -> Any:
    if hasattr(execute, "_observed"):
        return execute

    @functools.wraps(execute)
    def observed(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        parallel_config = self.parallel_config
        if parallel_config.data_parallel_size > 1:  # a lone rank, as prefill has, agrees with nobody
            for event in _events(scheduler_output, self.uniform_decode_query_len):
                _write(parallel_config.data_parallel_rank, event)
        return execute(self, scheduler_output, *args, **kwargs)

    observed._observed = True  # type: ignore[attr-defined]
    return observed


def _events(scheduler_output: Any, query_len: int) -> list[list[Any]]:
    """What is noteworthy in a step as it reaches the model runner, whichever scheduler made it."""
    widths = scheduler_output.num_scheduled_tokens
    drafts = scheduler_output.scheduled_spec_decode_tokens
    events: list[list[Any]] = []
    if scheduler_output.preempted_req_ids:
        events.append(["preempted", len(scheduler_output.preempted_req_ids)])

    def first_step(kind: str, request_id: str, computed: int) -> list[Any]:
        given = drafts.get(request_id, [])
        return [kind, request_id, computed, widths[request_id], len(given), list(given).count(-1)]

    for new in scheduler_output.scheduled_new_reqs:
        events.append(first_step("new", new.req_id, new.num_computed_tokens))
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        if request_id in cached.resumed_req_ids:
            events.append(first_step("resumed", request_id, computed))
    if any(width != query_len for width in widths.values()):
        events.append(["odd", dict(widths)])
    return events


def _write(rank: int, event: list[Any]) -> None:
    """Unbuffered: the process may be killed, and then its last lines matter most."""
    if rank not in _files:
        path = os.path.join(os.environ[DIRECTORY_ENV], f"rank{rank}-{os.getpid()}.jsonl")
        _files[rank] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(_files[rank], json.dumps(event, separators=(",", ":")).encode() + b"\n")
