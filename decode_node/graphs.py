"""The full graphs of uniform decode steps: which we ask for, and which vLLM will have."""

import copy

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher


def capture_sizes(num_speculative_tokens: int, max_num_seqs: int) -> list[int]:
    """Tokens of the full graphs to capture: (1 + K) * {1, 2, 4, …, max_num_seqs}, the largest always there.

    vLLM rounds sizes that are no multiple of 1 + K up and drops those above the largest
    (vllm/config/compilation.py:1530), so these are exact.
    """
    rows = {1 << power for power in range(max_num_seqs.bit_length()) if 1 << power <= max_num_seqs}
    return sorted((1 + num_speculative_tokens) * n for n in rows | {max_num_seqs})


def full_graph_tokens(vllm_config: VllmConfig) -> list[int]:
    """Tokens of each full graph, ascending, as vLLM's own dispatcher keeps them; no weights are needed.

    The worker does the same once its attention backend is known, which may still take the full graphs away
    (vllm/config/compilation.py, `resolve_cudagraph_mode_and_sizes`); `check_engine` looks at that.
    """
    compilation = copy.deepcopy(vllm_config.compilation_config)
    mode, width = compilation.cudagraph_mode, 1 + vllm_config.num_speculative_tokens
    if mode.decode_mode() != CUDAGraphMode.FULL or not compilation.cudagraph_capture_sizes:
        return []
    try:
        compilation.adjust_cudagraph_sizes_for_spec_decode(width)
    except ValueError:  # no size is left after rounding
        return []
    resolved = copy.copy(vllm_config)
    resolved.compilation_config = compilation
    dispatcher = CudagraphDispatcher(resolved)
    dispatcher.initialize_cudagraph_keys(mode, width)
    return sorted({key.num_tokens for key in dispatcher.cudagraph_keys[CUDAGraphMode.FULL]})
