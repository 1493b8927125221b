"""The flags that only a decode node has."""

from typing import Literal

from pydantic import Field

from lockstep.errors import ConfigError
from lockstep.node.config import NodeConfig

ASYNC_SCHEDULER = "decode_node.scheduler.LockstepScheduler"
SYNC_SCHEDULER = "decode_node.scheduler.LockstepSyncScheduler"
"""By name: only the engine core imports them."""

_ONLY = "exists only to reproduce the fault for the benchmark"


class DecodeConfig(NodeConfig):
    """Flags of `lockstep decode` on top of those of every node."""

    strict: bool = Field(
        False, description="a step with a row of another width than 1 + K ends the engine; for tests"
    )
    scheduler: Literal["lockstep", "stock"] = Field(
        "lockstep", description=f"stock is vLLM's own; it {_ONLY} and wants --i-know"
    )
    arrival_padding: Literal["on", "off"] = Field("on", description=f"off {_ONLY} and wants --i-know")
    i_know: bool = Field(False, description="allow a flag that is there for comparison only")

    def check_comparison(self) -> None:
        """Raises ConfigError for a flag of the benchmark that was not asked for twice or does nothing."""
        stock = self.scheduler == "stock"
        given = {
            "--scheduler stock": stock,
            "--arrival-padding off": self.arrival_padding == "off",
        }
        for flag, is_given in given.items():
            if is_given and not self.i_know:
                raise ConfigError(f"{flag}: {_ONLY}; remove it, or give --i-know as well")
        for flag, is_given in {"--strict": self.strict, **given}.items():
            if stock and is_given and flag != "--scheduler stock":
                raise ConfigError(f"{flag}: vLLM's own scheduler does not know it; remove --scheduler stock")
