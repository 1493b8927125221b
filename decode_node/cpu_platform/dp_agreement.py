"""Owns how ranks on one host agree on a step's graph mode and padding: over the MoE exchange instead of gloo.

vLLM all-reduces a [4, ranks] table over gloo once a step and once a draft step (dp_utils.py, `_run_ar`);
each rank fills its own column, so a gather of the columns is the same table.
"""

from typing import Any

import torch
from vllm.v1.worker import dp_utils

from decode_node.cpu_platform.exchange import Exchange


def agree_over(exchange: Exchange, world_size: int) -> None:
    """Replace vLLM's all-reduce of this process by a gather over the exchange of the DP group."""
    sizes = [1] * world_size

    def gather_columns(
        should_ubatch: bool,
        orig_num_tokens_per_ubatch: int,
        padded_num_tokens_per_ubatch: int,
        cudagraph_mode: int,
        parallel_config: Any,
    ) -> torch.Tensor:
        """[4, ranks] int32: tokens, padded tokens, wants microbatches, graph mode of every rank."""
        mine = (orig_num_tokens_per_ubatch, padded_num_tokens_per_ubatch, int(should_ubatch), cudagraph_mode)
        (rows,) = exchange.all_gatherv([torch.tensor([mine], dtype=torch.int32)], sizes)
        return rows.t()

    dp_utils._run_ar = gather_columns
