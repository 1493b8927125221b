"""Prefill's part of the hand-off in the model runner (V1): what it sampled and drafted goes to the connector.

A connector sees neither by itself, and under asynchronous scheduling the scheduler never sees drafts.
"""

from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from kv_transfer.handoff.worker import HandOffWorker


class HandOffRunnerMixin:
    """Put before a V1 model runner; idle on a rank whose connector waits for no first token."""

    input_batch: Any
    _draft_token_ids: Any
    _sampled_token_ids: torch.Tensor | None = None

    def _bookkeeping_sync(self, scheduler_output: Any, sampler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's (v1/worker/gpu_model_runner.py:3468); keeps the step's [rows, 1 or 1 + K] tokens."""
        self._sampled_token_ids = sampler_output.sampled_token_ids
        return super()._bookkeeping_sync(  # type: ignore[misc]
            scheduler_output, sampler_output, *args, **kwargs
        )

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As vLLM's (v1/worker/gpu_model_runner.py:4304), then hand over: the batch is still the step's."""
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        sampled, self._sampled_token_ids = self._sampled_token_ids, None
        worker = (
            getattr(get_kv_transfer_group(), "connector_worker", None) if has_kv_transfer_group() else None
        )
        if not isinstance(worker, HandOffWorker):  # no connector, or another one
            return output
        awaited = worker.first_tokens_awaited()
        rows = [self.input_batch.req_id_to_index.get(request_id) for request_id in awaited]
        if awaited and sampled is not None and None not in rows:
            worker.hand_over(list(awaited), _first_and_drafts(sampled, self._draft_token_ids, rows))
        return output


def _first_and_drafts(sampled: torch.Tensor, drafts: Any, rows: list[int]) -> torch.Tensor:
    """[rows, 1 + K] on the device, [rows, 1] without drafts; copies, since the runner reuses its tensors."""
    # One by one: an index made on the host would have to be copied to the device, which waits for it.
    if not isinstance(drafts, torch.Tensor):
        return torch.stack([sampled[row, :1] for row in rows]).to(torch.int64)
    return torch.stack([torch.cat([sampled[row, :1].to(drafts.dtype), drafts[row]]) for row in rows])
