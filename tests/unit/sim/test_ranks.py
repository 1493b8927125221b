"""What simulated ranks do in a step."""

import random

from unit.sim.rows_for_tests import row
from vllm.v1.engine import FinishReason

from lockstep.bounce import Bounce
from lockstep.sim.answers import GOES_ON
from lockstep.sim.config import SimFigures
from lockstep.sim.decode_rank import DecodeRank
from lockstep.sim.pool import KVPool
from lockstep.sim.prefill_rank import PrefillRank


def prefill(num_blocks: int = 100) -> PrefillRank:
    """Of blocks of 4 tokens, with steps of at most 10 tokens."""
    return PrefillRank(KVPool(num_blocks, 4, prefix_caching=True), max_num_seqs=4, max_tokens_a_step=10)


def decode(acceptance: float, num_blocks: int = 100, max_num_seqs: int = 4) -> DecodeRank:
    """With K = 2."""
    pool = KVPool(num_blocks, 4, prefix_caching=False)
    return DecodeRank(pool, max_num_seqs, 2, acceptance, random.Random(0))


def arrive(rank: DecodeRank, *names: str) -> None:
    """Requests of four tokens whose KV is there."""
    for name in names:
        rank.add(row(name, [5, 6, 7, 8]))
    for taken in rank.take_blocks():
        rank.kv_arrived(taken.request_id)


def test_prompts_are_computed_in_chunks_of_the_budget() -> None:
    """First come, first served; the step in which the last token is computed ends a row."""
    rank = prefill()
    rank.add(row("a", list(range(100, 112))))
    rank.add(row("b", list(range(200, 204))))
    assert rank.schedule() == 10
    assert rank.step() == []
    assert rank.schedule() == 6
    assert [done.request_id for done in rank.step()] == ["a", "b"]
    assert rank.schedule() == 0


def test_cached_tokens_are_not_computed() -> None:
    """The second of two equal prompts leaves one block to compute."""
    rank = prefill()
    for name in ("a", "b"):
        rank.add(row(name, list(range(100, 110))))
        tokens = rank.schedule()
        rank.step()
    assert tokens == 2


def test_a_prompt_waits_for_blocks() -> None:
    """Computed prompts hold theirs until they are pushed."""
    rank = prefill(num_blocks=3)
    rank.add(row("a", list(range(100, 108))))
    rank.add(row("b", list(range(200, 208))))
    assert rank.schedule() == 8
    (done,) = rank.step()
    assert rank.schedule() == 0
    assert rank.num_waiting == 1
    rank.pool.release(done.holding)
    assert rank.schedule() == 8


def test_a_dropped_prompt_gives_its_blocks_back() -> None:
    """While its chunks are computed."""
    rank = prefill()
    rank.add(row("a", list(range(100, 140))))
    rank.schedule()
    assert rank.drop("a") is not None
    assert rank.pool.usage == 0
    assert rank.step() == []


def test_accepted_drafts_come_with_the_step() -> None:
    """1 + K tokens where all are accepted, one where none is."""
    for acceptance, tokens in ((1.0, [5, 6, 7]), (0.0, [5])):
        rank = decode(acceptance)
        arrive(rank, "a")
        assert rank.schedule() == 1
        (said,) = rank.step()
        assert (said.tokens, said.end) == (tokens, GOES_ON)


def test_rows_wait_for_their_kv() -> None:
    """With blocks, and outside of every step."""
    rank = decode(1.0)
    rank.add(row("a", [5, 6]))
    assert [taken.request_id for taken in rank.take_blocks()] == ["a"]
    assert rank.schedule() == 0
    assert rank.num_waiting == 1


def test_no_more_rows_than_were_allowed() -> None:
    """The next one comes in when one has ended."""
    rank = decode(1.0, max_num_seqs=1)
    arrive(rank, "a", "b")
    assert rank.schedule() == 1
    rank.drop("a")
    assert rank.schedule() == 1
    assert rank.running[0].request_id == "b"


def test_an_answer_ends_at_its_limit() -> None:
    """Within a step: drafts beyond it are not said."""
    rank = decode(1.0)
    rank.add(row("a", [5, 6], max_tokens=4))
    rank.kv_arrived(rank.take_blocks()[0].request_id)
    rank.schedule()
    rank.step()
    (said,) = rank.step()
    assert (said.tokens, said.end) == ([6], (FinishReason.LENGTH, None))
    assert rank.pool.usage == 0


def test_another_attempt_goes_on_after_what_is_carried() -> None:
    """The carried tokens count towards the limit, and their KV is part of the prompt's."""
    rank = decode(1.0)
    rank.add(row("a", [5, 6], carried=(5, 6, 5), max_tokens=5))
    rank.kv_arrived(rank.take_blocks()[0].request_id)
    rank.schedule()
    (said,) = rank.step()
    assert (said.tokens, said.end[0]) == ([6, 5], FinishReason.LENGTH)


def test_without_blocks_a_row_is_handed_back() -> None:
    """With the tokens of its last step, which are good, and the word that the proxy knows."""
    rank = decode(1.0, num_blocks=4)
    arrive(rank, "a", "b")
    rank.schedule()
    first, second = rank.step()
    assert second.end == GOES_ON
    assert (first.tokens, first.end) == ([5, 6, 7], (FinishReason.ABORT, str(Bounce.PREEMPTED)))


def test_steps_take_longer_with_more_in_them() -> None:
    """Prefill by computed tokens, decode by the rows of the rank with the most, a push by its prompt."""
    figures = SimFigures(
        sim_prefill_step_ms=4,
        sim_prefill_us_per_token=100,
        sim_decode_step_ms=10,
        sim_decode_us_per_row=500,
        sim_push_ms=1,
        sim_push_us_per_token=2,
    )
    assert figures.prefill_step_s(50) == 0.009
    assert figures.decode_step_s(4) == 0.012
    assert figures.push_s(500) == 0.002
