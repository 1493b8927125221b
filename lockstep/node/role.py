"""What makes a node a prefill or a decode node: the seam between the shared runtime and the two services."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine import EngineCoreRequest

from lockstep.node.config import NodeConfig


class ApplyFlags(Protocol):
    """Sets the engine flags that the role owns; raises ConfigError for one that it refuses."""

    def __call__(self, args: AsyncEngineArgs, config: NodeConfig) -> None: ...


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


KVTransferParams = dict[str, Any]


def kv_transfer_params(request: EngineCoreRequest) -> KVTransferParams:
    """The request's `kv_transfer_params`, empty when it has none (vllm/v1/request.py reads them so)."""
    params = request.sampling_params
    if params is None or params.extra_args is None:
        return {}
    return params.extra_args.get("kv_transfer_params") or {}
