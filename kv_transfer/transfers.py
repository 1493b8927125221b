"""The writes that one worker has handed to NIXL, from the post until no handle of them is in flight."""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger

from kv_transfer.notices import Registration
from kv_transfer.prefill_ledger import Write
from kv_transfer.push_plan import Span

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class Settled:
    """A write that is not in flight any more. `seconds` since it was posted."""

    write: Write
    num_bytes: int
    seconds: float
    failed: bool


@dataclass(slots=True)
class _Posted:
    write: Write
    posted_at: float
    handles: list[Any]
    failed: bool
    num_bytes: int = 0


@dataclass(slots=True)
class _Made:
    """What vLLM's worker made of one write."""

    span: Span
    engine_id: str
    handles: list[Any] = field(default_factory=list)  # one for each decode worker that is written to
    failed: bool = False


class Transfers:
    """Every method is for the writer thread, but `engines` and, once that thread has ended, `release_all`."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._posted: dict[int, _Posted] = {}
        self._making: _Made | None = None
        self._prepared: dict[str, _Made] = {}  # by request; not posted

    def __len__(self) -> int:
        """Writes in flight."""
        return len(self._posted)

    def engines(self) -> set[str]:
        """Decode engines that are being written to, or may be at once."""
        posted = {posted.write.registration.peer.engine_id for posted in list(self._posted.values())}
        return posted | {prepared.engine_id for prepared in list(self._prepared.values())}

    def seconds_since_post(self) -> float:
        """Of the newest write in flight; infinite without one."""
        newest = max((posted.posted_at for posted in self._posted.values()), default=-math.inf)
        return time.monotonic() - newest

    def prepare(self, request_id: str, span: Span, registration: Registration) -> None:
        """Have a write ready that `post` may be asked for: vLLM takes as long to make one as NIXL to post it.

        The peer is connected. `drop_prepared` has to follow.
        """
        with self._worker.nixl_wrapper.only_preparing():
            made = self._make(request_id, span, registration)
        self.drop_prepared([request_id])
        if made.failed:
            self._release(request_id, made.handles)
        else:
            self._prepared[request_id] = made

    def drop_prepared(self, request_ids: Iterable[str]) -> None:
        """What was prepared for these and not posted will not be."""
        for request_id in request_ids:
            if (made := self._prepared.pop(request_id, None)) is not None:
                self._release(request_id, made.handles)

    def drop_prepared_to(self, engine_id: str) -> None:
        """They would keep the engine from being connected anew, and are good for the old connection only."""
        self.drop_prepared([rid for rid, made in self._prepared.items() if made.engine_id == engine_id])

    def post(self, write: Write) -> None:
        """Hand a write to NIXL; how it went comes out of `poll`."""
        posted_at = time.monotonic()
        span = Span(write.local_block_ids, write.remote_block_ids)
        made = self._prepared.get(write.request_id)
        if made is not None and (made.span, made.engine_id) == (span, write.registration.peer.engine_id):
            del self._prepared[write.request_id]
            made.failed = not all(self._posts(write.request_id, handle) for handle in made.handles)
        else:
            made = self._make(write.request_id, span, write.registration)
        # Without a handle nothing was written, e.g. because the peer was evicted since it was connected.
        failed = made.failed or not made.handles
        self._posted[write.number] = _Posted(write, posted_at, made.handles, failed)

    def made(self, handle: Any, *, failed: bool) -> None:
        """vLLM's worker made, and posted, one handle of the write that we asked for, or failed to (None)."""
        assert self._making is not None
        if handle is not None:
            self._making.handles.append(handle)
        self._making.failed = self._making.failed or failed

    def poll(self) -> list[Settled]:
        """Look at every handle; returns the writes of which none is left."""
        settled = []
        for number, posted in list(self._posted.items()):
            posted.handles = [handle for handle in posted.handles if not self._ended(posted, handle)]
            if not posted.handles:
                del self._posted[number]
                seconds = time.monotonic() - posted.posted_at
                settled.append(Settled(posted.write, posted.num_bytes, seconds, posted.failed))
        return settled

    def release_all(self) -> None:
        self.drop_prepared(list(self._prepared))
        for posted in self._posted.values():
            self._release(posted.write.request_id, posted.handles)
        self._posted.clear()

    def _make(self, request_id: str, span: Span, registration: Registration) -> _Made:
        """Have vLLM's worker make a write, and post it unless the agent is only preparing."""
        payload = dict(registration.payload)
        payload["local_block_ids"] = [list(group) for group in span.remote]
        made = self._making = _Made(span, registration.peer.engine_id)
        try:
            self._worker._do_start_push_kv(request_id, tuple(list(group) for group in span.local), payload)
        except Exception:  # the supervisor of one write: vLLM asserts and NIXL raises many kinds here
            logger.exception("A write of request %s could not be started", request_id)
            made.failed = True
        finally:
            self._making = None
        return made

    def _posts(self, request_id: str, handle: Any) -> bool:
        try:
            self._worker.nixl_wrapper.transfer(handle)
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no common base but Exception
            logger.warning("A write of request %s could not be started: %s", request_id, error)
            return False
        return True

    def _release(self, request_id: str, handles: Iterable[Any]) -> None:
        for handle in handles:
            self._worker._try_release_xfer_handle(request_id, handle)

    def _ended(self, posted: _Posted, handle: Any) -> bool:
        worker = self._worker
        try:
            state = worker.nixl_wrapper.check_xfer_state(handle)
            if state == "PROC":
                return False
            if state == "DONE":
                telemetry = worker.nixl_wrapper.get_xfer_telemetry(handle)
                worker.xfer_stats.record_transfer(telemetry)
                posted.num_bytes += telemetry.totalBytes
                worker._try_release_xfer_handle(posted.write.request_id, handle)
                return True
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no common base but Exception
            state = f"{type(error).__name__}: {error}"
        if not posted.failed:
            logger.warning("A write of request %s failed: %s", posted.write.request_id, state)
            worker.xfer_stats.record_failed_transfer()
            posted.failed = True
        # A handle that cannot be released may still be in flight (base_worker.py `_try_release_xfer_handle`).
        return bool(worker._try_release_xfer_handle(posted.write.request_id, handle))
