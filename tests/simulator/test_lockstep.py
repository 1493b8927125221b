"""Both ranks stay uniform, and every client gets each of its tokens once, whatever happens."""

import pytest
from hypothesis import HealthCheck, given, settings
from simulator.group import Group
from simulator.workload import Simulation, simulations

MIN_STEPS = 10_000
"""Of each of the two tests."""


@pytest.mark.parametrize("asynchronous", [True, False])
def test_every_step_of_both_ranks_is_uniform(asynchronous: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Arrivals, failed loads, pool pressure, limits, aborts: rows of 1 + K tokens, nothing lost, no leak."""
    num_steps = num_simulations = 0

    @settings(
        max_examples=200,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(simulations(asynchronous=asynchronous))
    def simulate(simulation: Simulation) -> None:
        nonlocal num_steps, num_simulations
        num_steps += Group(simulation).run().num_steps
        num_simulations += 1

    simulate()
    with capsys.disabled():
        mode = "asynchronous" if asynchronous else "synchronous"
        print(f"\n{num_simulations} {mode} simulations, {num_steps} steps")  # noqa: T201
    assert num_steps >= MIN_STEPS
