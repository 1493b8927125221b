"""The scheduler side of our connector: which requests wait for a push, and how each of them ends.

vLLM's push scheduler says nothing to the other side when a request ends early (nixl/push_scheduler.py:
`request_finished`); ours hands every such end to the worker, which tells the peer.
"""

import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from kv_transfer.chunks import ChunkTracker
from kv_transfer.config import ConnectorOptions
from kv_transfer.groups import group_layouts
from kv_transfer.handoff import worker_meta
from kv_transfer.handoff.sampling import FirstTokenTracker
from kv_transfer.metadata import CancelOrder, LockstepConnectorMetadata
from kv_transfer.params import TOKEN_KEY
from kv_transfer.stall import StallWatch, peer_of

logger = init_logger(__name__)

_PUSHED_STATUS = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class LockstepPushScheduler(NixlPushConnectorScheduler):
    """Adds cancels, early ends, carried tokens and the attempt's token to vLLM's push scheduler."""

    def __init__(
        self, vllm_config: Any, engine_id: str, kv_cache_config: Any, options: ConnectorOptions
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._layout = group_layouts(vllm_config, kv_cache_config)
        self._chunks = ChunkTracker(self._layout, kv_cache_config, stream=options.lockstep_stream_chunks)
        self._first_tokens = FirstTokenTracker()
        self._hand_offs: dict[str, bytes] = {}
        self._stall = StallWatch(options.lockstep_stall_patience_s)
        self._offered: list[str] = []
        self._awaiting_push: set[str] = set()
        self._cancels: list[CancelOrder] = []
        self._ended: dict[str, str] = {}
        self._abandoned: dict[str, str] = {}
        self._tokens: dict[str, str] = {}

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill"):
            self._stall.arrived(request.request_id, params)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Prefill pushes the KV of carried tokens too; vLLM counts the prompt (push_scheduler.py:120)."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return 0, False
        self._stall.considered(request.request_id)
        missing = self._get_remote_prefill_token_count(request.num_tokens) - num_computed_tokens
        return (missing, True) if missing > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        request_id: str = request.request_id
        params = request.kv_transfer_params
        self._stall.allocated(request_id)
        # vLLM's own watchdog only logs (push_scheduler.py:296); the worker keeps the real deadline.
        self._push_registration_deadlines.pop(request_id, None)
        if registration := self._push_pending_registrations.get(request_id):
            registration[TOKEN_KEY] = params.get(TOKEN_KEY, "")
            registration["lockstep_start_blocks"] = self._start_blocks(blocks)
            registration["lockstep_block_sizes"] = [group.block_size for group in self._layout]
            self._awaiting_push.add(request_id)
        elif params and params.get("do_remote_prefill") and num_external_tokens <= 0:
            # Nothing to load: a full prefix hit, or a request that may not read the cache. Prefill must not
            # hold its blocks until the lease ends.
            params["do_remote_prefill"] = False
            self._stall.ended(request_id)
            self._cancel(request, "nothing_to_load")
        elif params and params.get("do_remote_decode") and params.get(TOKEN_KEY):
            self._chunks.track(request)
            self._first_tokens.track(request)

    def take_hand_off(self, request_id: str) -> bytes:
        """Decode: what came with the KV of a request whose receive has ended; b"" if nothing did."""
        return self._hand_offs.pop(request_id, b"")

    def take_offered(self) -> list[str]:
        """Decode: requests without blocks whose prompt prefill holds computed, told while nothing moved here.

        They should get blocks first: prefill's blocks come free with them.
        """
        offered, self._offered = self._offered, []
        return [request_id for request_id in offered if self._stall.is_waiting(request_id)]

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params
        request_id: str = request.request_id
        if not params:
            return False, None
        if params.get("do_remote_decode"):
            return self._prefill_finished(request, block_ids)
        self._stop_heartbeat(request_id)
        self._stall.ended(request_id)
        self._hand_offs.pop(request_id, None)
        if params.get("do_remote_prefill"):
            # Never scheduled. vLLM would leave an empty receive behind that nothing completes.
            params["do_remote_prefill"] = False
            self._cancel(request, "aborted_before_allocation")
        elif request_id in self._awaiting_push:
            self._awaiting_push.discard(request_id)
            self._cancel(request, "aborted", allocated=True)
        return False, None

    def abandon(self, request_id: str, reason: str = "aborted_after_prefill") -> None:
        """Prefill: give the blocks of a *finished* request back, if no write of them is in flight.

        vLLM's `Scheduler.finish_requests` skips requests that have finished, so an abort that comes while
        their blocks wait for decode has to come in here. Unknown ids are ignored.
        """
        if request_id in self._finished_request_blocks:
            self._abandoned[request_id] = reason

    def build_connector_meta(self, scheduler_output: Any) -> LockstepConnectorMetadata:
        stock = super().build_connector_meta(scheduler_output)
        meta = LockstepConnectorMetadata()
        meta.__dict__.update(stock.__dict__)
        meta.cancels, self._cancels = self._cancels, []
        meta.questions = self._stall.step(
            idle=not scheduler_output.total_num_scheduled_tokens, now=time.monotonic()
        )
        meta.ended, self._ended = self._ended, {}
        meta.abandoned, self._abandoned = self._abandoned, {}
        meta.tokens, self._tokens = self._tokens, {}
        meta.preempted = sorted(scheduler_output.preempted_req_ids or ())
        meta.chunks = self._chunks.step(scheduler_output)
        meta.tokens |= {request_id: self._chunks.token(request_id) for request_id in meta.chunks}
        meta.first_tokens = self._first_tokens.step(scheduler_output)
        return meta

    def has_pending_push_work(self) -> bool:
        return bool(super().has_pending_push_work() or self._cancels or self._ended or self._abandoned)

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, worker_meta.HandOffWorkerMetadata):
            # A request that ended meanwhile has nobody to take it.
            worker_meta.add(
                self._hand_offs,
                {id_: told.payloads[id_] for id_ in self._awaiting_push & told.payloads.keys()},
            )
            self._offered += sorted(told.offered)
        for request_id in connector_output.finished_recving or ():
            self._awaiting_push.discard(request_id)
            self._stall.ended(request_id)
        for request_id in connector_output.failed_recving or ():
            self._awaiting_push.discard(request_id)
            self._stall.ended(request_id)
            self._stop_heartbeat(request_id)

    def _prefill_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        request_id: str = request.request_id
        self._chunks.forget(request_id)
        self._first_tokens.forget(request_id)
        token = request.kv_transfer_params.get(TOKEN_KEY)
        if not token and request.status in _PUSHED_STATUS:
            # No registration could ever match, so holding blocks would only wait for the lease.
            logger.warning("Request %s has no %s; nothing will be pushed", request_id, TOKEN_KEY)
            self._reqs_not_processed.add(request_id)
            self._ended[request_id] = "no_token"
            return False, None
        delay_free, params = super().request_finished(request, block_ids)
        if request_id in self._newly_finished_push_blocks:
            self._tokens[request_id] = token
        else:
            self._ended[request_id] = RequestStatus(request.status).name.lower()
        return delay_free, params

    def _start_blocks(self, blocks: Any) -> list[int]:
        """The place of the first block that is registered, in each group: those before it decode has."""
        groups = self.kv_cache_config.select_transfer_block_ids(blocks.blocks)
        unhashed = self.kv_cache_config.select_transfer_block_ids(blocks.get_unhashed_block_ids_all_groups())
        return [len(group) - len(missing) for group, missing in zip(groups, unhashed, strict=True)]

    def _cancel(self, request: Any, reason: str, *, allocated: bool = False) -> None:
        params = request.kv_transfer_params
        token = params.get(TOKEN_KEY, "")
        self._cancels.append(CancelOrder(request.request_id, peer_of(params), token, reason, allocated))
