"""Named cases with the right numbers: what ends a row's uniformity elsewhere, and what ours makes of it."""

from collections import Counter

import pytest
from simulator.client import Ask
from simulator.group import Group, Result, bounce_counts
from simulator.receiver import Push
from simulator.shape import Shape
from simulator.workload import Simulation
from vllm.v1.engine import FinishReason

from lockstep.bounce import Bounce


def run(shape: Shape, *asks: Ask, resets: tuple[tuple[int, int], ...] = ()) -> Result:
    """Every step's width and every token are checked on the way."""
    return Group(Simulation(shape, list(asks), list(resets))).run()


def total(result: Result, name: str) -> int:
    return sum(counters[name] for counters in result.counters)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_prompt_of_one_token_on_an_idle_rank(asynchronous: bool, k: int) -> None:
    """Its row has K placeholders although nothing is computed and nothing else runs."""
    shape = Shape(num_speculative_tokens=k, asynchronous=asynchronous)
    result = run(shape, Ask(prompt_tokens=1, max_tokens=5))
    assert total(result, "padded_arrivals") == (1 if k else 0)
    assert total(result, "placeholder_drafts") == k
    assert bounce_counts(result) == Counter()


def test_arrivals_join_running_rows_and_idle_ranks() -> None:
    """Every first row is padded, on the busy rank and on the one that had nothing."""
    result = run(Shape(), *(Ask(at=at, rank=at % 2, seed=at, family=at) for at in range(5)))
    assert [counters["padded_arrivals"] for counters in result.counters] == [3, 2]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("prompt_tokens", [1, 7, 8, 9, 30])
def test_requests_end_at_the_served_limit(asynchronous: bool, k: int, prompt_tokens: int) -> None:
    """A request that asks for more gets exactly the tokens up to the limit, and "length"."""
    shape = Shape(num_speculative_tokens=k, asynchronous=asynchronous, max_model_len=40)
    result = run(shape, Ask(prompt_tokens=prompt_tokens, max_tokens=1000))
    limit = 40 - k * (2 if asynchronous else 1) - 1
    (client,) = result.clients
    assert len(client.output) == limit - prompt_tokens
    assert client.finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize(("prompt_tokens", "num_tokens"), [(34, 1), (35, 0), (39, 0)])
def test_prompt_without_room_is_handed_back_for_good(prompt_tokens: int, num_tokens: int) -> None:
    """The limit is 40 - 2 * 2 - 1 = 35: a prompt of 34 gets one token, one of 35 none."""
    (client,) = run(Shape(max_model_len=40), Ask(prompt_tokens=prompt_tokens)).clients
    assert len(client.output) == num_tokens
    assert client.finish_reason == (FinishReason.LENGTH if num_tokens else FinishReason.ABORT)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_preempted_request_goes_back_with_its_tokens(asynchronous: bool) -> None:
    """Two that outgrow the pool: one is handed back, and its next attempt generates only what is missing."""
    shape = Shape(asynchronous=asynchronous, max_model_len=40, spare_blocks=0)
    asks = [Ask(max_tokens=25, seed=seed, family=seed, prompt_tokens=9) for seed in (3, 4)]
    result = run(shape, *asks)
    assert bounce_counts(result) == {Bounce.PREEMPTED: 1}
    # Two first attempts and one that carried tokens.
    assert total(result, "padded_arrivals") == 3


@pytest.mark.parametrize("outcome", ["fail", "fail_early", "silent", "unreachable"])
@pytest.mark.parametrize("reports_ids", [True, False])
def test_failed_load_goes_back(outcome: str, reports_ids: bool) -> None:
    """However the push fails and however the worker may say so; the second attempt is whole."""
    ask = Ask(pushes=(Push(outcome=outcome, ack_delay=5),))
    result = run(Shape(reports_ids=reports_ids), ask, Ask(at=1, seed=1, family=1))
    assert bounce_counts(result) == {Bounce.KV_LOAD_FAILED: 1}


def test_late_writes_of_a_failed_push_hit_nobody() -> None:
    """The blocks of a failed load stay out of use until prefill says that it writes no more."""
    shape = Shape(max_model_len=24, spare_blocks=3, max_num_seqs=4)
    failing = Ask(prompt_tokens=17, pushes=(Push(outcome="fail_early", delay=0, ack_delay=20),))
    result = run(shape, failing, *(Ask(at=3 + i, seed=i, family=1, prompt_tokens=9) for i in range(3)))
    assert bounce_counts(result)[Bounce.KV_LOAD_FAILED] == 1


@pytest.mark.parametrize("asynchronous", [True, False])
def test_reset_of_running_requests_hands_them_back(asynchronous: bool) -> None:
    """Their results in flight are dropped, as vLLM does, and generated again elsewhere."""
    asks = [Ask(max_tokens=30, seed=seed, family=seed) for seed in range(3)]
    result = run(Shape(asynchronous=asynchronous), *asks, resets=((7, 0),))
    assert bounce_counts(result) == {Bounce.PREEMPTED: 3}


def test_request_that_was_left_out_of_a_step_comes_back_full() -> None:
    """The step in flight keeps its blocks from being taken, so the rows behind wait a step for them."""
    shape = Shape(max_model_len=40, spare_blocks=0, max_num_seqs=3)
    asks = [Ask(max_tokens=25, seed=seed, family=seed, prompt_tokens=9) for seed in range(3)]
    result = run(shape, *asks)
    assert total(result, "reentries") >= 1
    assert bounce_counts(result)[Bounce.PREEMPTED] >= 1


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("threshold", [1, 2])
def test_long_prefill_threshold_cuts_no_row(asynchronous: bool, threshold: int) -> None:
    """Stock vLLM dies of it (test_stock.py)."""
    shape = Shape(asynchronous=asynchronous, long_prefill_token_threshold=threshold)
    assert bounce_counts(run(shape, Ask(), Ask(at=1, seed=1))) == Counter()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_grammar_leaves_rows_full(asynchronous: bool) -> None:
    """Drafts that the grammar refuses are replaced by placeholders, which count as such."""
    shape = Shape(asynchronous=asynchronous)
    result = run(shape, *(Ask(grammar_delay=1, max_tokens=20, seed=seed) for seed in range(3)))
    assert total(result, "placeholder_drafts") > (0 if asynchronous else 3 * 2)


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("at", range(1, 12))
def test_abort_at_any_moment_leaks_nothing(at: int, late: bool) -> None:
    """Also while its KV is on the way, while its step runs, and while it waits to be handed back."""
    shape = Shape(max_model_len=40, spare_blocks=0)
    asks = [Ask(max_tokens=25, seed=seed, family=seed, prompt_tokens=9) for seed in (3, 4)]
    run(shape, asks[0], Ask(max_tokens=25, seed=4, family=4, prompt_tokens=9, abort_at=at, late=late))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_arrived_requests_that_hold_each_others_blocks(asynchronous: bool, policy: str) -> None:
    """Of 18 blocks one has 15 and needs its 16th at once, another has 3: nothing runs to be preempted."""
    shape = Shape(
        asynchronous=asynchronous,
        num_speculative_tokens=0,
        max_model_len=64,
        spare_blocks=2,
        policy=policy,
    )
    now = (Push(delay=0), Push(delay=0))
    first = Ask(at=7, prompt_tokens=60, max_tokens=2, hand_off=True)
    result = run(shape, first, Ask(at=9, prompt_tokens=10, max_tokens=1, pushes=now, priority=1, seed=1))
    assert bounce_counts(result) == Counter({Bounce.PREEMPTED: 1})
    assert [len(client.output) for client in result.clients] == [2, 1]
    assert [len(client.bounces) for client in result.clients] == [0, 1]
