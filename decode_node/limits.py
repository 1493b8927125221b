"""The numbers that keep decode steps uniform: capture sizes, token budget, served context limit."""

from vllm.config import CUDAGraphMode, VllmConfig

from lockstep.errors import ConfigError


def capture_sizes(num_speculative_tokens: int, max_num_seqs: int) -> list[int]:
    """Tokens of the full graphs to capture: (1 + K) * {1, 2, 4, …, max_num_seqs}, the largest always there.

    vLLM rounds sizes that are no multiple of 1 + K up and drops those above the largest
    (vllm/config/compilation.py:1530), so these are exact.
    """
    rows = {1 << power for power in range(max_num_seqs.bit_length()) if 1 << power <= max_num_seqs}
    return sorted((1 + num_speculative_tokens) * n for n in rows | {max_num_seqs})


def served_context_limit(vllm_config: VllmConfig) -> int:
    """Tokens of prompt plus output such that no row is ever clipped at the engine's own limit.

    Under async scheduling the scheduler runs K tokens ahead for each batch in flight and would schedule fewer
    than 1 + K near max_model_len (vllm/v1/core/sched/scheduler.py:716).
    """
    ahead = num_speculative_tokens(vllm_config) * vllm_config.max_concurrent_batches
    return int(vllm_config.model_config.max_model_len - ahead - 1)


def num_speculative_tokens(vllm_config: VllmConfig) -> int:
    """The K of "1 + K tokens a step"; 0 without speculative decoding."""
    speculative = vllm_config.speculative_config
    return speculative.num_speculative_tokens if speculative is not None else 0


def check_lockstep(vllm_config: VllmConfig) -> None:
    """Refuse a group that would leave the full graph; ConfigError names the flag and a value that works."""
    width = 1 + num_speculative_tokens(vllm_config)
    scheduler, compilation = vllm_config.scheduler_config, vllm_config.compilation_config
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise ConfigError("--pipeline-parallel-size: a decode node runs without; give 1")
    if compilation.cudagraph_mode.decode_mode() != CUDAGraphMode.FULL:
        raise ConfigError(
            f"--compilation-config: the CUDA graph mode resolved to {compilation.cudagraph_mode.name}; "
            'decode needs {"cudagraph_mode": "FULL_DECODE_ONLY"} and no --enforce-eager'
        )
    needed = scheduler.max_num_seqs * width
    # Before the capture sizes, from which vLLM drops those above the budget.
    if scheduler.max_num_batched_tokens < needed:
        raise ConfigError(
            f"--max-num-batched-tokens: must be at least {needed}, which is --max-num-seqs "
            f"{scheduler.max_num_seqs} times 1 + K = {width} (got {scheduler.max_num_batched_tokens})"
        )
    if max(compilation.cudagraph_capture_sizes or [0]) < needed:
        raise ConfigError(
            f"--compilation-config: the largest cudagraph_capture_sizes entry must be {needed}, which is "
            f"--max-num-seqs {scheduler.max_num_seqs} times 1 + K = {width}"
        )
    if 0 < scheduler.long_prefill_token_threshold < width:
        raise ConfigError("--long-prefill-token-threshold: would clip decode rows; give 0")
    if served_context_limit(vllm_config) < 2:
        raise ConfigError("--max-model-len: leaves no room for a prompt and one token; give a larger value")
