"""The NIXL agent as we want it: its progress thread sleeps, and calls from two threads do not race.

NIXL's Python API hard-codes `agent_config.pthrDelay = 0` (nixl_cu12/_api.py, `nixl_agent.__init__`), so
the UCX progress thread polls without a pause: one core per engine, idle or not. With a delay it sleeps in
poll() and is still woken by events.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# `nixl_agent.__init__` reads the config class from its module, so one construction at a time.
_construction_lock = threading.Lock()


def agent_class(stock: type[Any], progress_delay_us: int) -> type[Any]:
    """`stock` (nixl_agent) with the progress thread's delay (µs) set."""
    api = sys.modules[stock.__module__]

    class LockstepNixlAgent(stock):
        """`nixl_agent` whose config keeps our progress delay whatever `__init__` writes to it."""

        _only_preparing = False

        def __init__(self, agent_name: str, nixl_conf: Any = None, instantiate_all: bool = False) -> None:
            # vLLM's writer thread and engine thread both call the agent; NIXL's default has no lock at all.
            if nixl_conf is not None and nixl_conf.sync_mode is None:
                nixl_conf.sync_mode = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            with _construction_lock, _fixed_progress_delay(api.nixlBind, progress_delay_us):
                super().__init__(agent_name, nixl_conf, instantiate_all)

        def make_prepped_xfer(self, operation: str, *sides: Any, notif_msg: bytes = b"", **rest: Any) -> Any:
            """Without vLLM's notice (push_worker.py `_xfer_blocks`): ours follows a request's last write."""
            return super().make_prepped_xfer(operation, *sides, **rest)

        def transfer(self, handle: Any, *args: Any) -> str:
            """Does nothing while `only_preparing` is open; then the handle is not in flight."""
            return "PROC" if self._only_preparing else str(super().transfer(handle, *args))

        @contextmanager
        def only_preparing(self) -> Iterator[None]:
            """While open, writes are made but not posted. For the one thread that posts any."""
            self._only_preparing = True
            try:
                yield
            finally:
                self._only_preparing = False

    return LockstepNixlAgent


@contextmanager
def agent_for_worker(progress_delay_us: int) -> Iterator[None]:
    """While open, vLLM's NIXL worker makes our agent (base_worker.py, `nixl_wrapper_cls = NixlWrapper`).

    Raises RuntimeError without NIXL.
    """
    # Here, so that the agent alone can be had without the seconds that importing vLLM takes.
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    stock = base_worker.NixlWrapper
    if stock is None:
        raise RuntimeError("NIXL is not available: install nixl and nixl-cu12 (or nixl-cu13)")
    base_worker.NixlWrapper = agent_class(stock, progress_delay_us)
    try:
        yield
    finally:
        base_worker.NixlWrapper = stock


@contextmanager
def _fixed_progress_delay(bindings: Any, progress_delay_us: int) -> Iterator[None]:
    stock = bindings.nixlAgentConfig

    class FixedDelayConfig(stock):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, progress_delay_us if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = FixedDelayConfig
    try:
        yield
    finally:
        bindings.nixlAgentConfig = stock
