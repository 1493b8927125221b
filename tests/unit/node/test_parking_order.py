"""In which order a step of an engine that may park says what it brought."""

import queue
from types import SimpleNamespace
from typing import Any

from lockstep.node.kv_events import engine_tap
from lockstep.node.parking.loop import Parking


class Tap:
    """What KV events go through, as the loop uses it."""

    told_after_steps = False

    def __init__(self, told: "queue.Queue[Any]") -> None:
        self._told = told

    def tell(self) -> None:
        self._told.put_nowait("KV events")


def test_outputs_go_before_kv_events() -> None:
    """Node and proxy handle one after the other, and a client waits for the former."""
    out: queue.Queue[Any] = queue.Queue()
    scheduler = SimpleNamespace(finished_recving_kv_req_ids=set(), running=[], requests={})
    tap = Tap(out)
    setattr(scheduler, engine_tap._ATTRIBUTE, tap)
    core = SimpleNamespace(
        scheduler=scheduler,
        model_executor=None,
        output_queue=out,
        engines_running=False,
        step_fn=lambda: ({0: "first token"}, True),
        post_step=lambda executed: None,
    )
    assert Parking(core).step()
    assert [out.get_nowait() for _ in range(2)] == [(0, "first token"), "KV events"]
    assert tap.told_after_steps
