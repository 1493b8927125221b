"""The first token and its drafts on their way from one real connector to another, with the KV."""

import random
from contextlib import closing
from typing import Any

import pytest
from component.kv_transfer.engines import FIRST_AND_DRAFTS, STEP_TOKENS, Pair

from kv_transfer.handoff import codec

pytestmark = pytest.mark.usefixtures("world")

LIMITS = {"num_drafts": 2, "vocab_size": 100}


def handed_over(pair: Pair, number: int, *, promised: bool = True) -> bytes:
    """Run both legs of a prompt of several chunks; what decode's scheduler can take with its KV."""
    prompt = random.sample(range(10, 9000), 2 * STEP_TOKENS + 10)
    request_id = f"ls-{number}-0-a1"
    pair.add_prefill(request_id, prompt, hand_off=promised)
    request = pair.add_decode(request_id, prompt, hand_off=promised)
    scheduler: Any = pair.decode.scheduler
    pair.until(lambda: request_id in scheduler.finished_recving_kv_req_ids)
    assert pair.decode.holds_kv_of(request)
    payload: bytes = scheduler.connector.take_hand_off(request_id)
    pair.until(lambda: pair.idle)
    return payload


@pytest.mark.parametrize("tp_sizes", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
def test_comes_with_the_kv(tp_sizes: tuple[int, int]) -> None:
    """Whichever ranks write to which: all say the same, and decode's scheduler gets it once."""
    with closing(Pair(40, {}, tp_sizes=tp_sizes)) as pair:
        payload = handed_over(pair, 1)
        first, *drafts = FIRST_AND_DRAFTS
        assert codec.decode(payload, **LIMITS) == codec.HandOff(first, tuple(drafts))


def test_comes_with_a_push_at_the_end() -> None:
    """Without streaming too."""
    with closing(Pair(40, {"lockstep_stream_chunks": False})) as pair:
        assert codec.decode(handed_over(pair, 2), **LIMITS).token_id == FIRST_AND_DRAFTS[0]


def test_nothing_comes_that_was_not_promised() -> None:
    """Decode samples its own first token then."""
    with closing(Pair(40, {})) as pair:
        assert handed_over(pair, 3, promised=False) == b""
