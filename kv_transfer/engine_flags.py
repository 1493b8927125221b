"""Sets the engine flags that load our connector, for a node of either role."""

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from kv_transfer.config import WORKER_EXTENSION_CLASS, Role, kv_transfer_config
from lockstep.node import flags
from lockstep.node.config import NodeConfig


def set_connector(args: AsyncEngineArgs, role: Role, config: NodeConfig) -> None:
    """Raises ConfigError when the user gave a connector or a worker extension of their own."""
    transfer = kv_transfer_config(
        role,
        kv_buffer_device=flags.kv_buffer_device(),
        extra_config={
            "nixl_progress_delay_us": config.nixl_progress_delay_us,
            # vLLM's own key (nixl/base_scheduler.py:84), in whole seconds.
            "kv_lease_duration": config.kv_lease_s,
            "lockstep_registration_deadline_s": config.registration_deadline_s,
            "lockstep_park": config.park == "on",
        },
    )
    flags.set_owned(args, "kv_transfer_config", KVTransferConfig(**transfer))
    flags.set_owned(args, "worker_extension_cls", WORKER_EXTENSION_CLASS)
