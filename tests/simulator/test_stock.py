"""The same driver over vLLM's own scheduler finds what ours prevents: so finding nothing means something."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from simulator.client import Ask
from simulator.group import Group, Result
from simulator.receiver import Push
from simulator.shape import Shape
from simulator.workload import Simulation, simulations
from vllm.v1.engine import FinishReason

from decode_node.scheduler.rows import Violation


def run(shape: Shape, *asks: Ask) -> Result:
    """With every other check on: vLLM's scheduler loses no token and leaks no block."""
    return Group(Simulation(shape, list(asks)), checks_width=False).run()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_driver_finds_every_cause(asynchronous: bool) -> None:
    """Arrivals, short drafts, the context limit and local prefills, in a few dozen simulations as a rule.

    Which ones are drawn depends on the modules that are loaded: hypothesis takes constants from them.
    """
    found: Counter[Violation] = Counter()

    @settings(
        max_examples=400,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    # vLLM dies of a threshold below 1 + K (scheduler.py:1372).
    @given(simulations(asynchronous=asynchronous, scheduler="stock", long_prefill_token_threshold=0))
    def simulate(simulation: Simulation) -> None:
        if set(found) == set(Violation):
            return
        found.update(run(simulation.shape, *simulation.asks).violations)

    simulate()
    assert set(found) == set(Violation)


def test_prompt_of_one_token_on_an_idle_rank() -> None:
    """vLLM pads an arrival only when tokens are computed or another row is there (scheduler.py:1139)."""
    result = run(Shape(scheduler="stock"), Ask(prompt_tokens=1))
    assert result.violations == {Violation.UNPADDED_ARRIVAL: 1}


def test_preemption_leads_to_a_local_prefill() -> None:
    """Two requests that outgrow the pool: the later one is computed anew, prompt and output, on this rank."""
    shape = Shape(scheduler="stock", max_model_len=40, spare_blocks=0)
    result = run(shape, Ask(max_tokens=29), Ask(max_tokens=29, at=1, seed=1, family=1))
    assert result.violations[Violation.LOCAL_PREFILL] >= 1


@pytest.mark.parametrize("asynchronous", [True, False])
def test_rows_near_the_context_limit_are_cut(asynchronous: bool) -> None:
    """With max_model_len as the limit of a request, its last rows have no room for K drafts."""
    shape = Shape(scheduler="stock", asynchronous=asynchronous, max_model_len=24)
    result = run(shape, *(Ask(max_tokens=14, seed=seed, family=seed) for seed in range(3)))
    assert result.violations[Violation.CONTEXT_LIMIT] >= 1


def test_request_without_a_remote_prefill_is_computed_here() -> None:
    """Nothing keeps a plain request off a decode rank."""
    result = run(Shape(scheduler="stock"), Ask(remote=False, prompt_tokens=10))
    assert result.violations[Violation.LOCAL_PREFILL] >= 1


def test_grammar_shortens_drafts_in_synchronous_scheduling() -> None:
    """Only drafts that the grammar allows are scheduled (scheduler.py:2566)."""
    result = run(Shape(scheduler="stock", asynchronous=False), Ask(grammar_delay=0, max_tokens=12))
    assert result.violations[Violation.SHORT_DRAFTS] >= 1


def test_threshold_below_the_width_ends_the_engine() -> None:
    """A padded arrival is cut behind vLLM's own assertion."""
    with pytest.raises(AssertionError):
        run(Shape(scheduler="stock", long_prefill_token_threshold=1), Ask(), Ask(at=1, seed=1))


def test_failed_load_is_an_error_to_the_client() -> None:
    """The policy "fail" of our connector's configuration."""
    result = run(Shape(scheduler="stock"), Ask(pushes=(Push(outcome="fail"),)))
    assert [client.finish_reason for client in result.clients] == [FinishReason.ERROR]
