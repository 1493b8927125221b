"""Puts parking into vLLM's engine core, which has no hook for its loop; runs inside it."""

import functools
from collections.abc import Callable
from typing import Any

from lockstep.node.parking import parks

_ATTRIBUTE = "_lockstep_parking"


def register() -> None:
    """Entry point of `vllm.general_plugins`; safe to run more than once."""
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCore, EngineCoreProc

    _replace(EngineCoreProc, "_process_input_queue", _process_input_queue)
    _replace(EngineCoreProc, "_process_engine_step", _process_engine_step)
    _replace(EngineCore, "execute_dummy_batch", _execute_dummy_batch)
    _replace(DPEngineCoreProc, "add_request", _add_request)
    _replace(DPEngineCoreProc, "_has_global_unfinished_reqs", _has_global_unfinished_reqs)


def _replace(owner: type, name: str, ours: Callable[..., Any]) -> None:
    """`ours(vllm's own, parking, core, ...)` for engine cores that park, vLLM's own for others."""
    stock = owner.__dict__[name]
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def method(core: Any, *args: Any, **kwargs: Any) -> Any:
        parking = _parking(core)
        if parking is None:
            return stock(core, *args, **kwargs)
        return ours(stock, parking, core, *args, **kwargs)

    setattr(owner, name, method)


def _parking(core: Any) -> Any:
    """The engine core's `Parking`, made on first use, or None; by then the core is whole."""
    if _ATTRIBUTE not in core.__dict__:
        from lockstep.node.parking.loop import Parking, can_park

        setattr(core, _ATTRIBUTE, Parking(core) if parks(core.vllm_config) and can_park(core) else None)
    return core.__dict__[_ATTRIBUTE]


def _process_input_queue(stock: Callable[..., None], parking: Any, core: Any) -> None:
    parking.wait()
    stock(core)


def _process_engine_step(stock: Callable[..., bool], parking: Any, core: Any) -> bool:
    stepped: bool = parking.step()
    return stepped


def _execute_dummy_batch(stock: Callable[..., None], parking: Any, core: Any) -> None:
    parking.dummy_round()


def _add_request(
    stock: Callable[..., None], parking: Any, core: Any, request: Any, request_wave: int = 0
) -> None:
    """A request of an old wave starts none: the step that runs it will."""
    stock(core, request, max(request_wave, core.current_wave))


def _has_global_unfinished_reqs(
    stock: Callable[..., bool], parking: Any, core: Any, local_unfinished: bool
) -> bool:
    """Ask the peers at once after a round that was idle on all ranks, not at the end of an interval."""
    interval = core.dp_sync_interval
    if parking.round_was_idle:
        core.dp_sync_interval = 1
    try:
        unfinished: bool = stock(core, local_unfinished)
    finally:
        core.dp_sync_interval = interval
    return unfinished
