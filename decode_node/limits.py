"""The numbers that keep decode steps uniform: served context limit, token budget, graphs; refused by name."""

from vllm.config import CUDAGraphMode, SchedulerConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from decode_node.config import ASYNC_SCHEDULER
from decode_node.graphs import capture_sizes, full_graph_tokens
from lockstep.errors import ConfigError
from lockstep.graphs import uncovered_batch
from lockstep.node.facts import EngineFacts

DEFAULT_MAX_NUM_SEQS = 256
"""vLLM's own default depends on the GPU; ours is fixed, since the capture sizes come from it."""

_BATCHED_MOE_BACKENDS = ("deepep_low_latency", "nixl_ep")
"""With these vLLM's default token budget is small (vllm/config/parallel.py, `use_batched_dp_moe`)."""


def set_default_batch(args: AsyncEngineArgs, num_speculative_tokens: int) -> None:
    """Fill in --max-num-seqs and --max-num-batched-tokens such that all rows of a step fit the budget.

    A decode step needs (1 + K) tokens a row and never more, so what the user gave of one bounds the other.
    """
    width = 1 + num_speculative_tokens
    if args.max_num_seqs is None:
        budget = args.max_num_batched_tokens
        fits = DEFAULT_MAX_NUM_SEQS if budget is None else max(budget // width, 1)
        args.max_num_seqs = min(DEFAULT_MAX_NUM_SEQS, fits)
    needed = args.max_num_seqs * width
    batched = args.all2all_backend in _BATCHED_MOE_BACKENDS
    smallest = (
        SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS_FOR_BATCHED_DP
        if batched
        else SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS
    )
    if args.max_num_batched_tokens is None and needed > smallest:
        args.max_num_batched_tokens = needed


def served_context_limit(vllm_config: VllmConfig) -> int:
    """Tokens of prompt plus output such that no row is ever clipped at the engine's own limit.

    Under async scheduling the scheduler runs K tokens ahead for each batch in flight and would schedule fewer
    than 1 + K near max_model_len (vllm/v1/core/sched/scheduler.py:716).
    """
    return int(vllm_config.model_config.max_model_len - _context_margin(vllm_config))


def _context_margin(vllm_config: VllmConfig) -> int:
    return int(vllm_config.num_speculative_tokens * vllm_config.max_concurrent_batches + 1)


def check_lockstep(vllm_config: VllmConfig) -> None:
    """Refuse a group that would leave the full graph; ConfigError names the flag and a value that works."""
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError("--pipeline-parallel-size: a decode node runs without; give 1")
    if parallel.distributed_executor_backend == "external_launcher":
        # Its ranks keep each other company with steps of one token (vllm/v1/worker/gpu_model_runner.py:4001).
        raise ConfigError("--distributed-executor-backend: external_launcher is not served; give mp")
    scheduler = vllm_config.scheduler_config
    if scheduler.scheduler_cls == ASYNC_SCHEDULER and not scheduler.async_scheduling:
        raise ConfigError(
            "--no-async-scheduling: vLLM turned asynchronous scheduling off for this configuration (its log "
            "says why); give this flag to go without"
        )
    _check_budget(vllm_config)
    _check_graphs(vllm_config)
    margin = _context_margin(vllm_config)
    if served_context_limit(vllm_config) < 2:
        raise ConfigError(
            f"--max-model-len: {vllm_config.model_config.max_model_len} leaves no room for a prompt and one "
            f"token below the margin of {margin}; give at least {margin + 2}"
        )


def _check_budget(vllm_config: VllmConfig) -> None:
    """All rows of a step must fit its token budget, or the last ones are clipped (scheduler.py:710)."""
    scheduler, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
    width = 1 + vllm_config.num_speculative_tokens
    rows = f"--max-num-seqs {scheduler.max_num_seqs}"
    # Parallel drafting puts further slots beside each row (vllm/config/speculative.py:1888).
    slots = speculative.max_num_new_slots_for_drafting if speculative is not None else 0
    needed, given = scheduler.max_num_seqs * (width + slots), scheduler.max_num_batched_tokens
    if given < needed:
        beside = f" plus {slots} slots for drafting" if slots else ""
        raise ConfigError(
            f"--max-num-batched-tokens: must be at least {needed}, which is {rows} times 1 + K = {width}"
            f"{beside} (got {given}); give {needed}, or --max-num-seqs {max(given // (width + slots), 1)}"
        )
    scheduled = scheduler.max_num_scheduled_tokens
    if scheduled is not None and scheduled < scheduler.max_num_seqs * width:
        raise ConfigError(
            f"--max-num-scheduled-tokens: must be at least {scheduler.max_num_seqs * width}, which is {rows} "
            f"times 1 + K = {width} (got {scheduled}); remove this flag"
        )
    threshold = scheduler.long_prefill_token_threshold
    if 0 < threshold < width:
        raise ConfigError(
            f"--long-prefill-token-threshold: {threshold} would clip decode rows of 1 + K = {width} tokens; "
            "give 0"
        )


def _check_graphs(vllm_config: VllmConfig) -> None:
    compilation, max_num_seqs = vllm_config.compilation_config, vllm_config.scheduler_config.max_num_seqs
    if compilation.cudagraph_mode.decode_mode() != CUDAGraphMode.FULL:
        raise ConfigError(
            f"--compilation-config: the CUDA graph mode resolved to {compilation.cudagraph_mode.name}; "
            'decode needs {"cudagraph_mode": "FULL_DECODE_ONLY"} and no --enforce-eager'
        )
    _check_covered(full_graph_tokens(vllm_config), vllm_config.num_speculative_tokens, max_num_seqs)


def _check_covered(full_graphs: list[int], num_speculative_tokens: int, max_num_seqs: int) -> None:
    width = 1 + num_speculative_tokens
    uncovered = uncovered_batch(full_graphs, width, max_num_seqs)
    if uncovered:
        raise ConfigError(
            f"--compilation-config: the full graphs for {full_graphs} tokens leave out a step of {uncovered} "
            f"requests, which has {uncovered * width} (--max-num-seqs {max_num_seqs}, 1 + K = {width}); give "
            f"no cudagraph_capture_sizes, or {capture_sizes(num_speculative_tokens, max_num_seqs)}"
        )


def check_engine(vllm_config: VllmConfig, facts: EngineFacts) -> None:
    """Refuse what only shows once the attention backend is known; ConfigError as in `check_lockstep`."""
    if not facts.full_graph_tokens:
        raise ConfigError(
            f"--attention-backend: the CUDA graph mode became {facts.cudagraph_mode or 'unknown'} on this "
            "device; give a backend that has full graphs for uniform batches (vLLM's log names the one that "
            "has not)"
        )
    _check_covered(
        facts.full_graph_tokens,
        vllm_config.num_speculative_tokens,
        vllm_config.scheduler_config.max_num_seqs,
    )
