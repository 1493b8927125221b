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

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        """As vLLM's (v1/worker/gpu_model_runner.py:3437); keeps the step's [rows, 1 or 1 + K] tokens.

        The drafter runs after it, and nobody who waits for a first token needs to wait for that.
        """
        output = super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        sampled = self._sampled_token_ids = output.sampled_token_ids
        worker, rows = self._awaited()
        if worker is not None and rows:
            worker.sampled(list(rows), torch.stack([sampled[row, 0] for row in rows.values()]))
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As vLLM's (v1/worker/gpu_model_runner.py:4304), then hand over: the batch is still the step's."""
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        sampled, self._sampled_token_ids = self._sampled_token_ids, None
        worker, rows = self._awaited()
        if worker is not None and rows and sampled is not None:
            first_and_drafts = _first_and_drafts(sampled, self._draft_token_ids, list(rows.values()))
            worker.hand_over(list(rows), first_and_drafts)
        return output

    def _awaited(self) -> tuple[HandOffWorker | None, dict[str, int]]:
        """The connector's worker, and by request id the rows whose first token it waits for."""
        group = get_kv_transfer_group() if has_kv_transfer_group() else None
        worker = getattr(group, "connector_worker", None)
        if not isinstance(worker, HandOffWorker):  # no connector, or another one
            return None, {}
        rows = {
            request_id: self.input_batch.req_id_to_index.get(request_id)
            for request_id in worker.first_tokens_awaited()
        }
        return worker, rows if None not in rows.values() else {}


def _first_and_drafts(sampled: torch.Tensor, drafts: Any, rows: list[int]) -> torch.Tensor:
    """[rows, 1 + K] on the device, [rows, 1] without drafts; copies, since the runner reuses its tensors."""
    # One by one: an index made on the host would have to be copied to the device, which waits for it.
    if not isinstance(drafts, torch.Tensor):
        return torch.stack([sampled[row, :1] for row in rows]).to(torch.int64)
    return torch.stack([torch.cat([sampled[row, :1].to(drafts.dtype), drafts[row]]) for row in rows])
