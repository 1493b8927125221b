"""What makes a node a prefill or a decode node: the seam between the shared runtime and the two services."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine import EngineCoreRequest

from lockstep.node.config import NodeConfig
from lockstep.node.facts import EngineFacts


class ApplyFlags(Protocol):
    """Sets the engine flags that the role owns; raises ConfigError for one that it refuses."""

    def __call__(self, args: AsyncEngineArgs, config: NodeConfig) -> None: ...


def _fits(vllm_config: VllmConfig, facts: EngineFacts) -> None:
    """Nothing that an engine core can make of a prefill node's configuration is unfit."""


def _tells_nothing(config: NodeConfig) -> bool:
    """Nobody would route by it."""
    return False


@dataclass(frozen=True, slots=True)
class Role:
    """One role, as pure functions over vLLM's own structs."""

    name: str
    """"prefill" or "decode"."""

    apply_flags: ApplyFlags
    check_config: Callable[[VllmConfig], None]
    """Looks at what vLLM resolved; raises ConfigError naming the flag and a value that works."""

    served_context_limit: Callable[[VllmConfig], int]
    """Tokens of prompt plus output that the proxy may admit."""

    check_request: Callable[[EngineCoreRequest], None]
    """Raises WrongLegError for work of the other role."""

    connector_version: str
    """A part of the compatibility key."""

    config: type[NodeConfig] = NodeConfig
    """The role's own flags on top of those that both have."""

    check_engine: Callable[[VllmConfig, EngineFacts], None] = _fits
    """Looks at what an engine core made of the configuration; raises ConfigError like `check_config`."""

    tells_kv_events: Callable[[NodeConfig], bool] = _tells_nothing
    """Whether proxies are told which blocks the prefix caches have."""

    warmup_prompt_tokens: int = 24
    """Length of the warm-up's prompts: what the role computes in one step."""


KVTransferParams = dict[str, Any]


def kv_transfer_params(request: EngineCoreRequest) -> KVTransferParams:
    """The request's `kv_transfer_params`, empty when it has none (vllm/v1/request.py reads them so)."""
    params = request.sampling_params
    if params is None or params.extra_args is None:
        return {}
    return params.extra_args.get("kv_transfer_params") or {}
