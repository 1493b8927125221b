"""Keeps min_tokens exact under asynchronous scheduling with speculation.

vLLM 0.32's V1 runner counts a request's output before it is known: it takes every draft of the step in
flight for accepted and appends a placeholder for each (worker/gpu_model_runner.py:1360). Penalties get the
real tokens put in just before they are used (worker/gpu_input_batch.py::update_async_output_token_ids);
min_tokens does not, so it lets go up to K tokens early, and for good
(sample/logits_processor/builtin.py:212). The synchronous scheduler has no placeholders and is right.
"""

from collections.abc import Sequence
from typing import Any, overload

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample import logits_processor
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor

PLACEHOLDER = -1
_NEED = "logitsprocs_need_output_token_ids"


class KnownTokens(Sequence[int]):
    """A live view of output tokens without the placeholders at their end."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    def __len__(self) -> int:
        count = len(self._token_ids)
        while count and self._token_ids[count - 1] == PLACEHOLDER:
            count -= 1
        return count

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._token_ids[: len(self)][index]


class KnownMinTokens(MinTokensLogitsProcessor):
    """vLLM's processor, counting only tokens that are known.

    Between steps it is at most one step behind; when logits are at hand the last step's tokens have been put
    in, so what it masks then is right.
    """

    @staticmethod
    def add_request(
        params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]
    ) -> Any:
        return MinTokensLogitsProcessor.add_request(params, prompt_token_ids, KnownTokens(output_token_ids))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Drop the requests that have enough by now, then mask; `logits` is [rows, vocabulary]."""
        self.update_state(None)
        return super().apply(logits)


def register() -> None:
    """Entry point of `vllm.general_plugins`; safe to run more than once."""
    from vllm.v1.worker.gpu_input_batch import InputBatch

    # With speculation vLLM makes this one by its name in that module (logits_processor/__init__.py:215).
    logits_processor.MinTokensLogitsProcessor = KnownMinTokens
    setattr(InputBatch, _NEED, property(_needs_output_token_ids, _set_needed))


def _needs_output_token_ids(batch: Any) -> bool:
    """Whether the tokens of the step in flight are to be put in before sampling: while a minimum is open too.

    vLLM asks for this where it puts the sampling metadata together, which a new request always makes it do.
    """
    return bool(batch.__dict__[_NEED]) or any(
        isinstance(processor, KnownMinTokens) and processor.min_toks
        for processor in batch.logitsprocs.non_argmax_invariant
    )


def _set_needed(batch: Any, value: bool) -> None:
    batch.__dict__[_NEED] = value
