"""Adds the utilities by which a node reads and tidies an engine core at any time; runs inside it.

vLLM calls a utility by name on its EngineCore object (vllm/v1/engine/core.py:1690) and runs every
`vllm.general_plugins` entry in the engine core first (:127), so a method added there can be called from the
node. vLLM's own statistics travel only with engine steps, which leaves an idle engine's numbers stale.
"""

from typing import Any

from lockstep.node.kv_events import EVENTS_UTILITY
from lockstep.node.parking import plugin as parking

STATUS_UTILITY = "lockstep_status"
FACTS_UTILITY = "lockstep_facts"
ABANDON_UTILITY = "lockstep_abandon"
ANNOUNCE_UTILITY = "lockstep_announce"


def register() -> None:
    """Entry point of `vllm.general_plugins` for all that a node adds to its engine cores.

    Safe to run more than once.
    """
    from vllm.v1.engine.core import EngineCore

    parking.register()
    setattr(EngineCore, STATUS_UTILITY, _lockstep_status)
    setattr(EngineCore, FACTS_UTILITY, _lockstep_facts)
    setattr(EngineCore, ABANDON_UTILITY, _lockstep_abandon)
    setattr(EngineCore, ANNOUNCE_UTILITY, _lockstep_announce)
    setattr(EngineCore, EVENTS_UTILITY, _lockstep_kv_events)


def _lockstep_status(engine_core: Any) -> dict[str, Any]:
    """The fields of lockstep.node.engine.RankStatus, as plain values for msgpack."""
    scheduler = engine_core.scheduler
    num_running, num_waiting = scheduler.get_request_counts()
    # The first worker speaks for the rank: with tensor parallelism all of them step together.
    worker = engine_core.model_executor.collective_rpc(_worker_status)[0]
    return {
        "num_running": num_running,
        "num_waiting": num_waiting,
        "kv_cache_usage": scheduler.kv_cache_manager.usage,
        "scheduler": _scheduler_counters(scheduler),
        **worker,
    }


def _scheduler_counters(scheduler: Any) -> dict[str, Any]:
    """What decode_node.scheduler counts: name to a number, or to {reason: number}; empty for another one."""
    read = getattr(scheduler, "lockstep_counters", None)
    counters: dict[str, Any] = read() if read is not None else {}
    return counters


def _lockstep_facts(engine_core: Any) -> dict[str, Any]:
    """The fields of lockstep.node.facts.EngineFacts."""
    scheduler_cls = type(engine_core.scheduler)
    return {
        "scheduler_cls": f"{scheduler_cls.__module__}.{scheduler_cls.__qualname__}",
        "async_scheduling": bool(engine_core.vllm_config.scheduler_config.async_scheduling),
        "num_kv_blocks": engine_core.vllm_config.cache_config.num_gpu_blocks,
        **engine_core.model_executor.collective_rpc(_worker_facts)[0],
    }


def _lockstep_kv_events(engine_core: Any, seen: int) -> Any:
    """The next changes of the prefix cache, in a future if there are none yet; see the tap."""
    from lockstep.node.kv_events import engine_tap

    return engine_tap.next_changes(engine_core, seen)


def _lockstep_abandon(engine_core: Any, request_ids: list[str]) -> None:
    """Give up the blocks that finished prefill legs hold for a decode rank that will not come for them.

    vLLM's own abort skips requests that have finished (vllm/v1/core/sched/scheduler.py, `finish_requests`).
    """
    abandon = getattr(engine_core.scheduler.get_kv_connector(), "abandon", None)
    if abandon is not None:
        for request_id in request_ids:
            abandon(request_id)


def _lockstep_announce(engine_core: Any, engine_ids: list[str]) -> None:
    """Tell the connectors of all workers with which engines they may shake hands."""
    engine_core.model_executor.collective_rpc("lockstep_announce", args=(engine_ids,))


def _worker_facts(worker: Any) -> dict[str, Any]:
    """The graphs by which the V1 runner's dispatcher decides; V2 has another one, which is not read."""
    dispatcher = getattr(worker.model_runner, "cudagraph_dispatcher", None)
    keys = dispatcher.cudagraph_keys if dispatcher is not None else {}
    return {
        "cudagraph_mode": dispatcher.cudagraph_mode.name if dispatcher is not None else "",
        "full_graph_tokens": sorted(
            {key.num_tokens for mode, found in keys.items() if mode.name == "FULL" for key in found}
        ),
        "records_steps": hasattr(worker, "lockstep_take_step_records"),
    }


def _worker_status(worker: Any) -> dict[str, Any]:
    """What the worker class and the connector's worker extension offer; a stock worker has neither."""
    take_steps = getattr(worker, "lockstep_take_step_records", None)
    read_kv = getattr(worker, "lockstep_kv_counters", None)
    steps = take_steps() if take_steps is not None else {"records": [], "dropped": 0}
    return {
        "steps": steps["records"],
        "steps_dropped": steps["dropped"],
        "kv": read_kv() if read_kv is not None else {},
    }
