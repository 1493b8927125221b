"""What hypothesis draws: a group's limits and what its clients ask of it, with every edge likely."""

import functools
from dataclasses import dataclass, field

from hypothesis import strategies as st
from simulator.client import Ask
from simulator.receiver import Push
from simulator.shape import BLOCK_SIZE, Shape

MAX_ASKS = 16


@dataclass(frozen=True, slots=True)
class Simulation:
    """A reproducible case: its repr is the code that makes it again."""

    shape: Shape
    asks: list[Ask]
    resets: list[tuple[int, int]] = field(default_factory=list)
    """(step, rank) of calls to reset the prefix cache and the running requests with it."""


PUSHES = st.builds(
    Push,
    delay=st.integers(0, 9),
    outcome=st.sampled_from(["complete"] * 8 + ["fail", "fail_early", "silent", "unreachable"]),
    ack_delay=st.integers(0, 8),
)

RESETS = st.just([]) | st.just([]) | st.lists(st.tuples(st.integers(1, 50), st.integers(0, 1)), max_size=2)


def shapes(*, asynchronous: bool, **fixed: object) -> st.SearchStrategy[Shape]:
    """K of 0 to 3, few sequences, a context of some blocks, and pools from the smallest possible."""
    drawn = {
        "num_speculative_tokens": st.integers(0, 3),
        "max_num_seqs": st.integers(1, 5),
        "max_model_len": st.sampled_from([20, 23, 28, 33, 40, 47, 64]),
        "spare_blocks": st.sampled_from([0, 1, 2, 3, 4, 6, 9, 100]),
        "reports_ids": st.booleans(),
        "policy": st.sampled_from(["fcfs", "fcfs", "priority"]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 1, 2]),
    }
    drawn |= {name: st.just(value) for name, value in fixed.items()}
    return st.builds(Shape, asynchronous=st.just(asynchronous), **drawn)


@functools.cache
def asks(k: int, limit: int) -> st.SearchStrategy[Ask]:
    """Prompts of one token, at block edges, and up to one more than is served; outputs of 1, K, K + 1."""
    edges = [n for block in range(1, 5) for n in (block * BLOCK_SIZE - 1, block * BLOCK_SIZE + 1)]
    rarely = st.none() | st.none() | st.none()
    return st.builds(
        Ask,
        at=st.integers(0, 30),
        rank=st.integers(0, 1),
        prompt_tokens=st.one_of(
            st.just(1),
            st.sampled_from([n for n in edges if n <= limit]),
            st.integers(1, max(limit // 2, 1)),
            st.integers(1, max(limit // 2, 1)),
            st.integers(max(limit - 3, 1), limit + 1),
        ),
        family=st.integers(0, 2),
        max_tokens=st.one_of(
            st.sampled_from([1, 2, max(k, 1), k + 1]), st.integers(1, limit), st.integers(limit // 2, limit)
        ),
        stop_at=rarely | st.integers(0, 30),
        seed=st.integers(0, 10_000),
        pushes=st.lists(PUSHES, max_size=3).map(tuple),
        abort_at=rarely | rarely | st.integers(0, 70),
        late=st.booleans(),
        grammar_delay=rarely | st.integers(0, 6),
        remote=st.integers(0, 7).map(bool),
        client=st.integers(0, 1),
        priority=st.integers(0, 2),
        hand_off=st.booleans(),
    )


@st.composite
def simulations(draw: st.DrawFn, *, asynchronous: bool, **fixed: object) -> Simulation:
    shape = draw(_shapes(asynchronous, tuple(fixed.items())))
    # vLLM's front end refuses a prompt of max_model_len, so its scheduler need not take one.
    limit = shape.context_limit if shape.scheduler == "lockstep" else shape.max_model_len - 2
    ask = asks(shape.num_speculative_tokens, limit)
    drawn = [draw(ask) for _ in range(draw(st.integers(1, MAX_ASKS)))]
    return Simulation(shape, drawn, draw(RESETS))


@functools.cache
def _shapes(asynchronous: bool, fixed: tuple[tuple[str, object], ...]) -> st.SearchStrategy[Shape]:
    return shapes(asynchronous=asynchronous, **dict(fixed))
