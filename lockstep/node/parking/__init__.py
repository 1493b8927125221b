"""An engine that only waits for KV stops stepping, and is woken when some has arrived.

vLLM looks for arrived KV once a step, so it steps as long as any request is unfinished: a lone rank every
millisecond, a group of ranks with a forward pass of dummies each time. Here such a rank blocks on its input
queue (`loop.py`), and a group in which no rank has anything to run ends its wave, as vLLM does when all
requests are done; the rank that then has something to run starts the next one. `scheduler.py` is the part in
the scheduler, `plugin.py` puts all of it into vLLM's engine core.
"""

from collections.abc import Mapping
from typing import Any

OPTION = "lockstep_park"
"""In `kv_connector_extra_config`; set by the node."""


def parks(vllm_config: Any) -> bool:
    """Whether engines with this configuration park."""
    transfer = vllm_config.kv_transfer_config
    extra: Mapping[str, Any] = transfer.kv_connector_extra_config if transfer is not None else {}
    return bool(extra.get(OPTION, False))
