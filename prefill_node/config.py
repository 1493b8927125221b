"""The flags that only a prefill node has."""

from typing import Literal

from pydantic import Field

from lockstep.node.config import NodeConfig


class PrefillConfig(NodeConfig):
    """Flags of `lockstep prefill` on top of those of every node."""

    kv_events: Literal["on", "off"] = Field(
        "on",
        description="off: proxies are not told which blocks the prefix cache has, and route by load",
    )
