"""What each routing policy comes to against round robin, in a simulated cluster."""

import functools

import pytest
from unit.proxy.routing_simulation import Outcome, Simulation, workload

from proxy.config import PolicyName

SEEDS = (1, 3)
NUM_REQUESTS = 300
CALM, BUSY = 15.0, 25.0
"""Requests a second; at the second one prefill is hardly fast enough without its caches."""


@functools.cache
def outcome(name: PolicyName, seed: int, requests_a_second: float = BUSY) -> Outcome:
    return Simulation(name).run(workload(seed, NUM_REQUESTS, requests_a_second))


def mean_ttft_s(result: Outcome) -> float:
    return sum(result.ttft_s) / len(result.ttft_s)


@pytest.mark.parametrize("seed", SEEDS)
def test_least_loaded_keeps_decode_ranks_more_equal(seed: int) -> None:
    """Fewer tokens of graphs are left empty, and where there is no shortage prompts wait for less long."""
    assert outcome("least_loaded", seed).imbalance < 0.9 * outcome("round_robin", seed).imbalance
    calm = [mean_ttft_s(outcome(name, seed, CALM)) for name in ("least_loaded", "round_robin")]
    assert calm[0] < 0.9 * calm[1]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["prefix", "lockstep"])
def test_known_prefixes_halve_the_latest_first_tokens(name: PolicyName, seed: int) -> None:
    """The turns of a conversation find what was computed before, so prefill has half as much to do."""
    known, blind = outcome(name, seed), outcome("round_robin", seed)
    assert known.cached_share > 2 * blind.cached_share
    assert known.ttft_p99_s < 0.5 * blind.ttft_p99_s


@pytest.mark.parametrize("seed", SEEDS)
def test_lockstep_fills_graphs_best(seed: int) -> None:
    """It knows the sizes of the graphs; the others count requests or nothing."""
    mine = outcome("lockstep", seed).imbalance
    assert mine < 0.75 * outcome("round_robin", seed).imbalance
    assert mine < outcome("least_loaded", seed).imbalance
    assert mine < outcome("prefix", seed).imbalance


@pytest.mark.parametrize("seed", SEEDS)
def test_lockstep_leaves_a_long_queue_for_another_rank(seed: int) -> None:
    """The longest prefix is of no use behind everybody else who has it."""
    assert outcome("lockstep", seed).ttft_p99_s < outcome("prefix", seed).ttft_p99_s
