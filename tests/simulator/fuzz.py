"""Simulations for a number of steps: `make fuzz`. A failure prints the smallest case found."""

import argparse
import logging
import random
import sys
import time

import hypothesis
from hypothesis import HealthCheck, given, settings
from simulator.group import Group
from simulator.workload import Simulation, simulations

EXAMPLES = 400
"""Of each round; a round is of one mode."""


def run_round(seed: int, *, asynchronous: bool) -> int:
    """Returns the number of steps driven. Raises what a simulation raises."""
    num_steps = 0

    @hypothesis.seed(seed)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(simulations(asynchronous=asynchronous))
    def simulate(simulation: Simulation) -> None:
        nonlocal num_steps
        num_steps += Group(simulation).run().num_steps

    simulate()
    return num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500_000, help="engine steps to drive")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # vLLM logs each connector that is made and each load that fails
    started, num_steps, num_rounds = time.monotonic(), 0, 0
    sys.stdout.write(f"seed {arguments.seed}\n")
    while num_steps < arguments.steps:
        num_steps += run_round(arguments.seed + num_rounds, asynchronous=num_rounds % 2 == 0)
        num_rounds += 1
        seconds = time.monotonic() - started
        sys.stdout.write(f"{num_steps} steps in {num_rounds * EXAMPLES} simulations, {seconds:.0f} s\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
