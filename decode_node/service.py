"""What a decode node is: engine flags that make every step uniform, and the requests that it takes."""

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreRequest

from decode_node.limits import capture_sizes, check_lockstep, served_context_limit
from kv_transfer import params
from kv_transfer.config import CONNECTOR_VERSION
from kv_transfer.engine_flags import set_connector
from lockstep.errors import WrongLegError
from lockstep.node import cpu_environment, flags, support
from lockstep.node.config import NodeConfig
from lockstep.node.role import Role, kv_transfer_params

DEFAULT_MAX_NUM_SEQS = 256
"""vLLM's own default depends on the GPU; ours is fixed, since the capture sizes come from it."""


def apply_flags(args: AsyncEngineArgs, config: NodeConfig) -> None:
    """Consume KV, and capture a full graph for every batch size that a uniform step can have."""
    support.check_flags(args)
    set_connector(args, "decode", config)
    if current_platform.is_cpu():
        cpu_environment.assign_cores(args.data_parallel_size_local or args.data_parallel_size)
    if args.max_num_seqs is None:
        args.max_num_seqs = DEFAULT_MAX_NUM_SEQS
    num_speculative_tokens = (args.speculative_config or {}).get("num_speculative_tokens") or 0
    flags.default_compilation(
        args,
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
        cudagraph_capture_sizes=capture_sizes(num_speculative_tokens, args.max_num_seqs),
    )


def check_config(vllm_config: VllmConfig) -> None:
    """Refuse what is not served, then what would leave the full graph."""
    support.check_supported(vllm_config)
    check_lockstep(vllm_config)


def check_request(request: EngineCoreRequest) -> None:
    """Take decode legs only: the prompt's KV comes from a prefill rank."""
    support.check_request(request)
    try:
        params.parse_decode_leg(kv_transfer_params(request), request.request_id)
    except ValueError as error:
        raise WrongLegError(str(error)) from error
    if request.sampling_params is None or request.sampling_params.prompt_logprobs is not None:
        # They need the whole prompt computed here (vllm-surface: skip_reading_prefix_cache).
        raise WrongLegError("prompt_logprobs come from the prefill leg", param="prompt_logprobs")


ROLE = Role(
    name="decode",
    apply_flags=apply_flags,
    check_config=check_config,
    served_context_limit=served_context_limit,
    check_request=check_request,
    connector_version=CONNECTOR_VERSION,
)
