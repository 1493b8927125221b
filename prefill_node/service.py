"""What a prefill node is: its engine flags, and the requests that it takes."""

import os

from vllm.config import CUDAGraphMode, KVEventsConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreRequest

from kv_transfer import params
from kv_transfer.carried.vllm_schedulers import SCHEDULER
from kv_transfer.config import CONNECTOR_VERSION
from kv_transfer.engine_flags import set_connector
from lockstep.errors import ConfigError, WrongLegError
from lockstep.node import flags, support
from lockstep.node.config import NodeConfig
from lockstep.node.role import Role, kv_transfer_params
from prefill_node.config import PrefillConfig

_INT_HASHES = "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"

GPU_WORKER = "prefill_node.gpu_worker.PrefillGpuWorker"


def apply_flags(args: AsyncEngineArgs, config: NodeConfig) -> None:
    """Produce KV and first tokens; leave the graphs to vLLM where there are any."""
    support.check_flags(args)
    set_connector(args, "prefill", config)
    flags.set_owned(args, "scheduler_cls", SCHEDULER)
    if tells_kv_events(config):
        _enable_kv_events(args)
    if current_platform.is_cpu():
        flags.default_compilation(args, cudagraph_mode=CUDAGraphMode.NONE)
        if args.async_scheduling is None:
            # A step is computed when `execute_model` returns: with two in flight, the tokens of each would
            # wait until the next one is computed too (vllm/v1/engine/core.py:753).
            args.async_scheduling = False
    elif current_platform.is_cuda() and args.worker_cls == "auto":
        args.worker_cls = GPU_WORKER


def tells_kv_events(config: NodeConfig) -> bool:
    """Proxies route by what the prefix cache has."""
    return isinstance(config, PrefillConfig) and config.kv_events == "on"


def _enable_kv_events(args: AsyncEngineArgs) -> None:
    """Have the engine make events, with whole hashes; if nobody else wants them, published to nobody.

    A hash cut to an integer cannot be looked up any more (vllm/v1/core/kv_cache_utils.py:96).
    """
    given = args.kv_events_config
    if given is None or not given.enable_kv_cache_events:
        args.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        os.environ[_INT_HASHES] = "0"
    elif os.environ.get(_INT_HASHES) != "0":
        raise ConfigError(
            f"--kv-events-config: its events have integers in place of hashes, which --kv-events on cannot "
            f"use; set {_INT_HASHES}=0, or give --kv-events off"
        )


def check_config(vllm_config: VllmConfig) -> None:
    """Refuse what is not served; nothing else that vLLM resolves makes a prefill node unfit by itself."""
    support.check_supported(vllm_config)


def served_context_limit(vllm_config: VllmConfig) -> int:
    return int(vllm_config.model_config.max_model_len)


def check_request(request: EngineCoreRequest) -> None:
    """Take prefill legs only: one token after those that are carried, and the KV pushed to a decode rank."""
    support.check_request(request)
    try:
        leg = params.parse_prefill_leg(kv_transfer_params(request))
    except ValueError as error:
        raise WrongLegError(str(error)) from error
    carried = len(leg.output_token_ids)
    if request.sampling_params is None or request.sampling_params.max_tokens != carried + 1:
        raise WrongLegError(
            "a prefill leg has max_tokens 1, and one more for each carried token", param="max_tokens"
        )
    if carried and request.sampling_params.prompt_logprobs is not None:
        raise WrongLegError("prompt_logprobs belong to the first attempt", param="prompt_logprobs")


ROLE = Role(
    name="prefill",
    apply_flags=apply_flags,
    check_config=check_config,
    served_context_limit=served_context_limit,
    check_request=check_request,
    connector_version=CONNECTOR_VERSION,
    config=PrefillConfig,
    tells_kv_events=tells_kv_events,
)
