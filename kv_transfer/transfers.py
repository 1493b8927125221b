"""The writes that one worker has handed to NIXL, from the post until no handle of them is in flight."""

import math
import time
from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger

from kv_transfer.prefill_ledger import Write

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
    handles: list[Any] = field(default_factory=list)  # one for each decode worker that is written to
    num_bytes: int = 0
    failed: bool = False


class Transfers:
    """Every method is for the writer thread, but `engines` and, once that thread has ended, `release_all`."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._posted: dict[int, _Posted] = {}
        self._posting: _Posted | None = None

    def __len__(self) -> int:
        """Writes in flight."""
        return len(self._posted)

    def engines(self) -> set[str]:
        """Decode engines that are being written to."""
        return {posted.write.registration.peer.engine_id for posted in list(self._posted.values())}

    def seconds_since_post(self) -> float:
        """Of the newest write in flight; infinite without one."""
        newest = max((posted.posted_at for posted in self._posted.values()), default=-math.inf)
        return time.monotonic() - newest

    def post(self, write: Write) -> None:
        """Hand a write to NIXL; how it went comes out of `poll`."""
        payload = dict(write.registration.payload)
        payload["local_block_ids"] = [list(group) for group in write.remote_block_ids]
        posted = self._posting = self._posted[write.number] = _Posted(write, time.monotonic())
        try:
            self._worker._do_start_push_kv(
                write.request_id, tuple(list(group) for group in write.local_block_ids), payload
            )
        except Exception:  # the supervisor of one write: vLLM asserts and NIXL raises many kinds here
            logger.exception("A write of request %s could not be started", write.request_id)
            posted.failed = True
        finally:
            self._posting = None
        # Without a handle nothing was written, e.g. because the peer was evicted since it was connected.
        posted.failed = posted.failed or not posted.handles

    def posted(self, handle: Any, *, failed: bool) -> None:
        """vLLM's worker posted one handle of the write that `post` is at, or failed to (then maybe None)."""
        assert self._posting is not None
        if handle is not None:
            self._posting.handles.append(handle)
        self._posting.failed = self._posting.failed or failed

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
        for posted in self._posted.values():
            for handle in posted.handles:
                self._worker._try_release_xfer_handle(posted.write.request_id, handle)
        self._posted.clear()

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
