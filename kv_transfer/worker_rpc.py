"""A mixin for vLLM's `worker_extension_cls`, through which a node reads the connector's counters any time."""

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from kv_transfer.connector import LockstepPushConnector


class KVWorkerExtension:
    """Becomes a base of vLLM's worker class; its methods are called by name with `collective_rpc`."""

    def lockstep_kv_counters(self) -> dict[str, Any]:
        """This worker's `KVCounters.snapshot` and quarantine gauges; {} without a Lockstep connector."""
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        if not isinstance(connector, LockstepPushConnector) or connector.connector_worker is None:
            return {}
        return connector.connector_worker.counters_snapshot()
