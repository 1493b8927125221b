"""When a decode rank asks prefill what can be done, and about which requests."""

from kv_transfer.params import PrefillPeer, decode_leg_params
from kv_transfer.stall import MAX_QUESTIONS, Question, StallWatch

PEER = PrefillPeer("p0", "127.0.0.1", 5600, 1)
TOKEN = "a" * 32


def watch(*request_ids: str) -> StallWatch:
    made = StallWatch(patience_s=1.0)
    for request_id in request_ids:
        made.arrived(request_id, decode_leg_params(PEER, request_id, TOKEN))
    return made


def reserve(book: StallWatch, request_id: str) -> None:
    book.considered(request_id)
    book.allocated(request_id)


def stand_still(book: StallWatch, head: str, now: float) -> list[Question]:
    """A step in which the request at the head of the queue finds no blocks, and nothing runs."""
    book.considered(head)
    return book.step(idle=True, now=now)


def test_a_rank_that_stands_still_asks_about_all_that_wait() -> None:
    """After its patience, and again each time that it is over; the oldest first."""
    book = watch("a", "b", "c")
    reserve(book, "a")
    assert stand_still(book, "b", now=10.0) == []
    assert stand_still(book, "b", now=10.9) == []
    asked = [Question("a", PEER, TOKEN, True), *(Question(name, PEER, TOKEN, False) for name in "bc")]
    assert stand_still(book, "b", now=11.0) == asked
    assert stand_still(book, "b", now=11.5) == []
    assert stand_still(book, "b", now=12.0) == asked


def test_a_step_with_rows_begins_the_wait_anew() -> None:
    """What runs ends, and gives its blocks back."""
    book = watch("a", "b")
    reserve(book, "a")
    stand_still(book, "b", now=10.0)
    book.considered("b")
    assert book.step(idle=False, now=10.5) == []
    assert stand_still(book, "b", now=11.0) == []


def test_reservations_alone_are_no_stall() -> None:
    """Nobody needs their blocks: prefill may take its time."""
    book = watch("a", "b")
    reserve(book, "a")
    reserve(book, "b")
    assert book.step(idle=True, now=10.0) == []
    assert book.step(idle=True, now=20.0) == []


def test_without_a_reservation_nothing_can_be_given_up() -> None:
    """The blocks are missing for another reason: a quarantine, say."""
    book = watch("a")
    stand_still(book, "a", now=10.0)
    assert stand_still(book, "a", now=20.0) == []


def test_requests_that_have_their_kv_or_ended_are_not_asked_about() -> None:
    """They need nothing of prefill."""
    book = watch("a", "b", "c")
    reserve(book, "a")
    book.ended("b")
    stand_still(book, "c", now=10.0)
    assert [question.request_id for question in stand_still(book, "c", now=11.0)] == ["a", "c"]
    book.ended("a")
    assert stand_still(book, "c", now=20.0) == []
    assert book.is_waiting("c")
    assert not book.is_waiting("a")


def test_questions_are_bounded() -> None:
    """However long the queue is."""
    book = watch(*(f"r{number}" for number in range(3 * MAX_QUESTIONS)))
    reserve(book, "r0")
    stand_still(book, "r1", now=10.0)
    assert len(stand_still(book, "r1", now=11.0)) == MAX_QUESTIONS
