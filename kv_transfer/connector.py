"""`LockstepPushConnector`, which vLLM loads by `kv_connector_module_path`: it only joins the two sides."""

from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPushConnector

from kv_transfer.config import ConnectorOptions
from kv_transfer.handoff.worker import BeginTelling
from kv_transfer.handoff.worker_meta import HandOffWorkerMetadata
from kv_transfer.scheduler import LockstepPushScheduler
from kv_transfer.worker import LockstepPushWorker


class LockstepPushConnector(NixlPushConnector):
    """`NixlPushConnector` with our scheduler and worker sides."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        # NixlPushConnector's own constructor would make vLLM's sides, and with them a second NIXL agent.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            raise ValueError("LockstepPushConnector does not support decode_context_parallel_size > 1")
        options = ConnectorOptions.from_extra_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self.connector_scheduler: LockstepPushScheduler | None = None
        self.connector_worker: LockstepPushWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = LockstepPushScheduler(
                vllm_config, self.engine_id, kv_cache_config, options
            )
        else:
            self.connector_worker = LockstepPushWorker(vllm_config, self.engine_id, kv_cache_config, options)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        assert self.connector_worker is not None
        self.connector_worker.handle_preemptions(kv_connector_metadata)

    def wait_for_save(self) -> None:
        super().wait_for_save()
        assert self.connector_worker is not None
        self.connector_worker.wait_for_save()

    def build_connector_worker_meta(self) -> HandOffWorkerMetadata | None:
        """Worker side of decode, once a step: what came with KV that has arrived, and prefill's answers."""
        assert self.connector_worker is not None
        payloads = self.connector_worker.take_payloads()
        offered, revoked = self.connector_worker.take_answers()
        if not payloads and not offered and not revoked:
            return None
        return HandOffWorkerMetadata(payloads, offered, revoked)

    def lockstep_has_news(self) -> bool:
        """Worker side: see `LockstepPushWorker.has_news`; what parks the engine asks it."""
        assert self.connector_worker is not None
        return self.connector_worker.has_news()

    def lockstep_on_news(self, wake: Callable[[], None]) -> None:
        """Worker side: see `LockstepPushWorker.on_news`."""
        assert self.connector_worker is not None
        self.connector_worker.on_news(wake)

    def lockstep_on_first_tokens(self, begin_telling: BeginTelling) -> None:
        """Worker side of prefill: see `HandOffWorker.on_first_tokens`."""
        assert self.connector_worker is not None
        self.connector_worker.on_first_tokens(begin_telling)

    def take_hand_off(self, request_id: str) -> bytes:
        """Scheduler side of decode: see `LockstepPushScheduler.take_hand_off`."""
        assert self.connector_scheduler is not None
        return self.connector_scheduler.take_hand_off(request_id)

    def take_offered(self) -> list[str]:
        """Scheduler side of decode: see `LockstepPushScheduler.take_offered`."""
        assert self.connector_scheduler is not None
        return self.connector_scheduler.take_offered()

    def abandon(self, request_id: str) -> None:
        """Scheduler side of prefill: see `LockstepPushScheduler.abandon`."""
        assert self.connector_scheduler is not None
        self.connector_scheduler.abandon(request_id)
