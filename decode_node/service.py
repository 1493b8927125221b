"""What a decode node is: engine flags that make every step uniform, and the requests that it takes."""

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreRequest

from decode_node.config import ASYNC_SCHEDULER, SYNC_SCHEDULER, DecodeConfig
from decode_node.graphs import capture_sizes
from decode_node.limits import check_engine, check_lockstep, served_context_limit, set_default_batch
from kv_transfer import params
from kv_transfer.carried.vllm_schedulers import SCHEDULER as STOCK_SCHEDULER
from kv_transfer.config import CONNECTOR_VERSION
from kv_transfer.engine_flags import set_connector
from lockstep.errors import ConfigError, WrongLegError
from lockstep.node import cpu_environment, flags, support
from lockstep.node.config import NodeConfig
from lockstep.node.role import Role, kv_transfer_params

GPU_WORKER = "decode_node.gpu_worker.LockstepGpuWorker"


def apply_flags(args: AsyncEngineArgs, config: NodeConfig) -> None:
    """Consume KV, keep steps uniform, and capture a full graph for every batch size that a step can have."""
    if not isinstance(config, DecodeConfig):
        raise TypeError("a decode node's configuration is a DecodeConfig")
    config.check_comparison()
    support.check_flags(args)
    set_connector(args, "decode", config)
    _set_scheduler(args, config)
    if current_platform.is_cpu():
        cpu_environment.assign_cores(args.data_parallel_size_local or args.data_parallel_size)
    elif current_platform.is_cuda() and args.worker_cls == "auto":
        args.worker_cls = GPU_WORKER
    num_speculative_tokens = _num_speculative_tokens(args)
    set_default_batch(args, num_speculative_tokens)
    flags.default_compilation(
        args,
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
        cudagraph_capture_sizes=capture_sizes(num_speculative_tokens, args.max_num_seqs),
    )


def _num_speculative_tokens(args: AsyncEngineArgs) -> int:
    """The K that was given. vLLM would take a missing one from the model, after the graphs were chosen."""
    if not args.speculative_config:
        return 0
    given = args.speculative_config.get("num_speculative_tokens")
    if not isinstance(given, int) or given < 1:
        raise ConfigError("--speculative-config: num_speculative_tokens is missing; give a number from 1")
    return given


def _set_scheduler(args: AsyncEngineArgs, config: DecodeConfig) -> None:
    """By name: the class is imported in the engine core. Stock is vLLM's own in all but carried tokens."""
    if config.scheduler == "stock":
        flags.set_owned(args, "scheduler_cls", STOCK_SCHEDULER)
        return
    scheduler = SYNC_SCHEDULER if args.async_scheduling is False else ASYNC_SCHEDULER
    flags.set_owned(args, "scheduler_cls", scheduler)
    flags.set_settings(args, strict=config.strict, arrival_padding=config.arrival_padding == "on")


def check_config(vllm_config: VllmConfig) -> None:
    """Refuse what is not served, then what would leave the full graph."""
    support.check_supported(vllm_config)
    check_lockstep(vllm_config)


def check_request(request: EngineCoreRequest) -> None:
    """Take decode legs only: the prompt's KV comes from a prefill rank."""
    support.check_request(request)
    try:
        leg = params.parse_decode_leg(kv_transfer_params(request), request.request_id)
    except ValueError as error:
        raise WrongLegError(str(error), param="kv_transfer_params") from error
    sampling = request.sampling_params
    if sampling is None or sampling.prompt_logprobs is not None:
        # They need the whole prompt computed here (vllm-surface: skip_reading_prefix_cache).
        raise WrongLegError("prompt_logprobs come from the prefill leg", param="prompt_logprobs")
    if sampling.max_tokens is not None and len(leg.output_token_ids) >= sampling.max_tokens:
        message = f"kv_transfer_params.{params.OUTPUT_TOKEN_IDS_KEY} has all of max_tokens already"
        raise WrongLegError(message, param="kv_transfer_params")


ROLE = Role(
    name="decode",
    apply_flags=apply_flags,
    check_config=check_config,
    served_context_limit=served_context_limit,
    check_request=check_request,
    connector_version=CONNECTOR_VERSION,
    config=DecodeConfig,
    check_engine=check_engine,
    # One token is what a decode row computes; more would be a prefill, which our scheduler hands back.
    warmup_prompt_tokens=1,
)
