"""A mixin for vLLM's `worker_extension_cls`, through which a node speaks with the connector any time."""

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from kv_transfer.connector import LockstepPushConnector
from kv_transfer.worker import LockstepPushWorker


class KVWorkerExtension:
    """Becomes a base of vLLM's worker class; its methods are called by name with `collective_rpc`."""

    def lockstep_kv_counters(self) -> dict[str, Any]:
        """This worker's `KVCounters.snapshot` and quarantine gauges; {} without a Lockstep connector."""
        worker = _connector_worker()
        return worker.counters_snapshot() if worker is not None else {}

    def lockstep_announce(self, engine_ids: list[str]) -> None:
        """From now on the connector shakes hands with these decode engines only."""
        if (worker := _connector_worker()) is not None:
            worker.announce(engine_ids)


def _connector_worker() -> LockstepPushWorker | None:
    connector = get_kv_transfer_group() if has_kv_transfer_group() else None
    return connector.connector_worker if isinstance(connector, LockstepPushConnector) else None
