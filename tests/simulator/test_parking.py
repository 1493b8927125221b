"""A group that only waits for KV rests, is woken by what arrives, and leaves no rank alone in a round."""

import random
import time
from pathlib import Path

import pytest
from simulator.client import Ask
from simulator.parked_group import parked_group
from simulator.parked_rank import TICK_S
from simulator.receiver import Push
from simulator.shape import Shape


def test_ranks_that_wait_for_kv_make_no_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.4 s of waiting: no forward pass, a few looks; then the answer, and rounds end with it."""
    with parked_group(Shape(), tmp_path, monkeypatch) as group:
        started = time.monotonic()
        group.drive([Ask(max_tokens=6, pushes=(Push(delay=20),))])
        (first, _), *_ = group.rounds.log
        assert first - started > 19 * TICK_S, "the tick in which it was asked may be almost over"
        looks = [rank.executor.looks for rank in group.ranks]
        # One for the request, one each tenth of a second while it waits, those with rows, one at the end.
        assert max(looks) <= 1 + 5 + 6 + 4, looks
        idle = [all_idle for _, all_idle in group.rounds.log]
        assert sum(idle) <= 1, "the group goes to rest once the last row is done"


def test_group_stays_in_step_under_random_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrivals, failures, aborts and grammars on both ranks; every client gets its tokens."""
    drawn = random.Random(3)
    outcomes = ["complete"] * 6 + ["fail", "fail_early", "unreachable"]
    asks = [
        Ask(
            at=drawn.randrange(40),
            rank=drawn.randrange(2),
            prompt_tokens=drawn.choice([1, 7, 9, 16, 20]),
            max_tokens=drawn.choice([1, 3, 8, 20]),
            seed=number,
            family=number % 3,
            pushes=(Push(drawn.randrange(12), drawn.choice(outcomes), 1),),
            abort_at=drawn.choice([None, None, None, drawn.randrange(5, 50)]),
            grammar_delay=drawn.choice([None, None, 4]),
            hand_off=drawn.random() < 0.5,
        )
        for number in range(30)
    ]
    with parked_group(Shape(spare_blocks=6), tmp_path, monkeypatch) as group:
        group.drive(asks)
        rounds = len(group.rounds.log)
        assert rounds > 30
        assert sum(all_idle for _, all_idle in group.rounds.log) < rounds / 2
