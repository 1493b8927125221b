"""Owns what is noted of a hand-over inside engine processes: when each of its stages is reached.

The benchmark installs a copy of this file as a vLLM general plugin (`install.py`), so that Lockstep's own
code does without. It wraps methods of Lockstep and vLLM. One line of JSON for each event goes to
STAGE_OBSERVER_DIR/<pid>.jsonl: [stage, request_id, seconds of the machine's monotonic clock], and for each
step that runs the model ["ran", 0 or 1, start, end], 1 for a dummy step. Stages, in order:

    sampled    prefill has the first token
    drafted    it has the drafts as well
    staged     both and the last chunk are with the writer thread
    posting    NIXL is told to make the last write, which it may do at once
    posted     it returns
    written    the writer has seen that the write is done
    telling    NIXL is told to send the notice
    seen       decode's writer has read the notice
    admitted   decode's scheduler has taken the request up
    first_step decode's model starts with it
    first_token its first output is there
"""

import functools
import json
import os
import time
from typing import Any

DIRECTORY_ENV = "STAGE_OBSERVER_DIR"
STEPPING_ENV = "STAGE_OBSERVER_STEPPING"
"""Set: the connector's writer works as vLLM's does, each millisecond and when a step wakes it."""

_file: list[int] = []
_posting: list[str] = []
"""The requests whose writes were posted, on the one thread that does it."""


def register() -> None:
    """Entry point of `vllm.general_plugins`; safe to run more than once."""
    if DIRECTORY_ENV not in os.environ:
        return
    from nixl_cu12._api import nixl_agent
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import PUSH_REG_NOTIF_PREFIX
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    from kv_transfer.decode_ledger import DecodeLedger
    from kv_transfer.handoff.worker import HandOffWorker
    from kv_transfer.notices import Completed, decode_notice
    from kv_transfer.peers import PeerLinks
    from kv_transfer.prefill_ledger import PrefillLedger
    from kv_transfer.transfers import Transfers
    from kv_transfer.worker import LockstepPushWorker
    from kv_transfer.writer import PushWriter

    def telling(_: Any, engine_id: str, data: bytes) -> None:
        if not data.startswith(PUSH_REG_NOTIF_PREFIX):
            notice = decode_notice(data)
            if isinstance(notice, Completed):
                _note("telling", notice.request_id)

    if STEPPING_ENV in os.environ:
        _step_as_vllm(PushWriter, LockstepPushWorker)
    _before(HandOffWorker, "sampled", lambda _, request_ids, *args: _note("sampled", *request_ids))
    _before(HandOffWorker, "hand_over", lambda _, request_ids, *args: _note("drafted", *request_ids))
    _after(PrefillLedger, "computed", lambda _, request_id, *args: _note("staged", request_id))
    _before(Transfers, "post", lambda _, write: _posting.append(write.request_id))
    _before(nixl_agent, "transfer", lambda *args: _note("posting", *_posting[-1:]))
    _after(nixl_agent, "transfer", lambda *args: _note("posted", *_posting[-1:]))
    _before(PeerLinks, "notify", telling)
    _after(Transfers, "poll", _settled)
    _before(DecodeLedger, "completed", lambda _, notice, *args: _note("seen", notice.request_id))
    _before(Scheduler, "_update_waiting_for_remote_kv", lambda _, r: _note("admitted", r.request_id))
    _before(GPUModelRunner, "execute_model", _step_starts)
    _after(GPUModelRunner, "sample_tokens", _step_ends)
    _before(Worker, "execute_dummy_batch", _dummy_starts)
    _after(Worker, "execute_dummy_batch", _dummy_ends)


def _step_as_vllm(writer: Any, worker: Any) -> None:
    """Take back what Lockstep adds: writes made ahead, sooner looks, steps that leave the writer alone."""
    if writer.foresee is _nothing_foreseen:
        return
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import push_worker

    look_again_s = writer.poll_interval_s
    shortest_s = push_worker._PUSH_WRITER_POLL_INTERVAL_MS / 1000
    writer.poll_interval_s = lambda self: max(shortest_s, look_again_s(self))
    writer.foresee = _nothing_foreseen
    _before(worker, "get_transfer_results", lambda self: self._push_writer_wake.set())


def _nothing_foreseen(*args: Any) -> None:
    pass


def _before(owner: type, name: str, look: Any) -> None:
    _wrap(owner, name, look, before=True)


def _after(owner: type, name: str, look: Any) -> None:
    _wrap(owner, name, look, before=False)


def _wrap(owner: type, name: str, look: Any, *, before: bool) -> None:
    method, mark = getattr(owner, name), f"_observed_{'before' if before else 'after'}"
    if hasattr(method, mark):
        return

    @functools.wraps(method)
    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before:
            look(self, *args)
        result = method(self, *args, **kwargs)
        if not before:
            look(self, *(args or (result,)))
        return result

    setattr(observed, mark, True)
    setattr(owner, name, observed)


def _settled(_: Any, settled: list[Any]) -> None:
    for done in settled:
        _note("written", done.write.request_id)


def _step_starts(runner: Any, scheduler_output: Any, *args: Any) -> None:
    if scheduler_output.total_num_scheduled_tokens:
        runner._observed_step = time.monotonic(), [new.req_id for new in scheduler_output.scheduled_new_reqs]
        _note("first_step", *runner._observed_step[1])


def _step_ends(runner: Any, *args: Any) -> None:
    started, new = getattr(runner, "_observed_step", (None, []))
    if started is not None:
        runner._observed_step = None, []
        _note("first_token", *new)
        _write(["ran", 0, started, time.monotonic()])


def _dummy_starts(worker: Any, *args: Any) -> None:
    worker._observed_dummy = time.monotonic()


def _dummy_ends(worker: Any, *args: Any) -> None:
    _write(["ran", 1, worker._observed_dummy, time.monotonic()])


def _note(stage: str, *request_ids: str) -> None:
    now = time.monotonic()
    for request_id in request_ids:
        _write([stage, request_id, now])


def _write(event: list[Any]) -> None:
    if not _file:
        path = os.path.join(os.environ[DIRECTORY_ENV], f"{os.getpid()}.jsonl")
        _file.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
    os.write(_file[0], json.dumps(event).encode() + b"\n")
