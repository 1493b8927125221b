"""The scheduler beside vLLM's own push connector, as under a plain vLLM server."""

import dataclasses

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from simulator.client import Ask
from simulator.group import Group, bounce_counts
from simulator.receiver import Push
from simulator.shape import Shape
from simulator.workload import Simulation, simulations

from decode_node.scheduler.rows import Violation
from lockstep.bounce import Bounce


@pytest.mark.parametrize("asynchronous", [True, False])
def test_uniform_with_vllms_own_connector(asynchronous: bool) -> None:
    """A caller that sends prompt and output anew after a bounce gets every token once."""

    @settings(
        max_examples=25,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(simulations(asynchronous=asynchronous, connector="stock"))
    def simulate(simulation: Simulation) -> None:
        Group(Simulation(simulation.shape, [_without_failures(ask) for ask in simulation.asks])).run()

    simulate()


def test_a_plain_request_is_handed_back() -> None:
    """Without do_remote_prefill its prompt would be computed on the decode rank."""
    result = Group(Simulation(Shape(connector="stock"), [Ask(remote=False)])).run()
    assert bounce_counts(result) == {Bounce.LOCAL_PREFILL: 1}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_padding_off_sends_arrivals_out_as_one_token(asynchronous: bool) -> None:
    """The fault that started it, for comparison: one short row an arrival, counted, and the same tokens."""
    shape = Shape(asynchronous=asynchronous, arrival_padding=False, strict=False)
    asks = [Ask(at=at, seed=at, family=at, prompt_tokens=1 + 9 * (at > 0)) for at in range(3)]
    result = Group(Simulation(shape, asks), checks_width=False).run()
    assert result.violations == {Violation.UNPADDED_ARRIVAL: 3}
    assert sum(counters["padded_arrivals"] for counters in result.counters) == 0
    assert sum(counters["violations"].get("unpadded_arrival", 0) for counters in result.counters) >= 1


def _without_failures(ask: Ask) -> Ask:
    """Without the notices of our connector, a receive that fails never ends, nor does one that is aborted
    (vllm/…/nixl/push_scheduler.py:296)."""
    completed = tuple(dataclasses.replace(push, outcome="complete") for push in ask.pushes)
    return dataclasses.replace(ask, pushes=completed or (Push(),), grammar_delay=None)
