"""Prefill's record of pushes: exact matching, tokens, cancels, deadlines, in every order of events."""

import itertools

import pytest

from kv_transfer.notices import Ask, Cancel, DecodePeer, Registration
from kv_transfer.prefill_ledger import Complete, Offer, PrefillLedger, Release, Reply, Warn, Write
from kv_transfer.push_plan import Chunk, GroupLayout

LAYOUT = (GroupLayout(block_size=16, streamed=True),)
PEER = DecodePeer(engine_id="d0", host="127.0.0.1", port=5700, tp_size=1)
BLOCKS = ((1, 2, 3),)
TOKEN = "a" * 32
OTHER = "b" * 32
RID = "ls-1-0-a1"


def ledger(ttl_s: float = 100.0, limit: int = 100) -> PrefillLedger:
    return PrefillLedger(LAYOUT, ttl_s, limit)


def registration(token: str = TOKEN, request_id: str = RID, deadline: float = 60.0) -> Registration:
    return Registration(request_id, token, PEER, ((7, 8, 9),), (0,), (16,), deadline, {})


def push(number: int = 1) -> Write:
    """The write of all three blocks, after the prompt."""
    return Write(RID, number, BLOCKS, ((7, 8, 9),), registration(), streamed=False)


def start(book: PrefillLedger, write: Write, now: float = 0) -> None:
    assert book.starting(write, now) == (True, [])


def cancel(token: str = TOKEN, registered: bool = True, reason: str = "aborted") -> Cancel:
    return Cancel(request_id=RID, token=token, reason=reason, registered=registered, peer=PEER)


def reply(reason: str, token: str = TOKEN) -> Reply:
    return Reply(RID, PEER, token, reason)


def test_push_when_decode_registered_first() -> None:
    """The registration waits, and the finished prompt is pushed to it."""
    book = ledger()
    assert book.registered(registration(), now=0) == []
    assert book.finished(RID, BLOCKS, TOKEN, now=1) == [push()]


def test_push_when_prefill_finished_first() -> None:
    """The blocks wait, and are pushed when the registration comes."""
    book = ledger()
    assert book.finished(RID, BLOCKS, TOKEN, now=0) == []
    assert book.registered(registration(), now=1) == [push()]


@pytest.mark.parametrize("other", ["ls-1-0-a1-0123abcd", "ls-1-0-a", "ls-1-0-a11"])
def test_ids_match_exactly(other: str) -> None:
    """An id that vLLM's suffix rule would match, or a prefix, matches nothing."""
    finished_first, registered_first = ledger(), ledger()
    finished_first.finished(RID, BLOCKS, TOKEN, now=0)
    assert finished_first.registered(registration(request_id=other), now=0) == []
    registered_first.registered(registration(), now=0)
    assert registered_first.finished(other, BLOCKS, TOKEN, now=0) == []


def test_wrong_token_is_refused_and_the_blocks_still_wait() -> None:
    """A registration with another token gets an answer, no push, and does not use the blocks up."""
    book = ledger()
    book.finished(RID, BLOCKS, TOKEN, now=0)
    assert book.registered(registration(OTHER), now=0) == [reply("token_mismatch", OTHER)]
    assert book.registered(registration(), now=0) == [push()]


def test_wrong_token_that_came_first_does_not_displace_the_right_one() -> None:
    """Of two registrations the one with the leg's token is pushed to, the other is answered."""
    book = ledger()
    book.registered(registration(OTHER), now=0)
    book.registered(registration(), now=0)
    assert book.finished(RID, BLOCKS, TOKEN, now=0) == [
        reply("token_mismatch", OTHER),
        push(),
    ]


def test_prefill_aborted_after_registration_answers_at_once() -> None:
    """Decode learns of the end without waiting for any deadline."""
    book = ledger()
    book.registered(registration(), now=0)
    assert book.ended(RID, "finished_aborted", now=1) == [reply("finished_aborted")]
    assert not book.outstanding


def test_prefill_aborted_before_registration_answers_the_later_one() -> None:
    """The end is remembered for the registration that is still under way."""
    book = ledger()
    assert book.ended(RID, "finished_aborted", now=0) == []
    assert book.registered(registration(), now=5) == [reply("finished_aborted")]


def test_cancel_of_held_blocks_releases_them_and_answers() -> None:
    """Finished, then cancelled: prefill's blocks are back at once."""
    book = ledger()
    book.finished(RID, BLOCKS, TOKEN, now=0)
    assert book.cancelled(cancel(), now=1) == [Release(RID, "aborted"), reply("aborted")]


def test_cancel_while_computing_prevents_the_push() -> None:
    """Registered, cancelled, then finished: nothing is written, the blocks go back."""
    book = ledger()
    book.registered(registration(), now=0)
    assert book.cancelled(cancel(), now=1) == [reply("aborted")]
    assert book.finished(RID, BLOCKS, TOKEN, now=2) == [Release(RID, "aborted")]


def test_cancel_before_prefill_knows_the_request() -> None:
    """Cancelled first: the leg that arrives later is not held for anybody."""
    book = ledger()
    assert book.cancelled(cancel(registered=False), now=0) == []
    assert book.finished(RID, BLOCKS, TOKEN, now=1) == [Release(RID, "aborted")]


def test_cancel_overtakes_its_registration() -> None:
    """Both are answered; nothing waits."""
    book = ledger()
    assert book.cancelled(cancel(), now=0) == [reply("aborted")]
    assert book.registered(registration(), now=0) == [reply("aborted")]
    assert not book.outstanding


def test_cancel_with_another_token_does_not_stop_the_push() -> None:
    """Only the attempt itself can cancel itself."""
    book = ledger()
    book.cancelled(cancel(OTHER), now=0)
    book.finished(RID, BLOCKS, TOKEN, now=0)
    assert book.cancelled(cancel(OTHER), now=0) == [reply("aborted", OTHER)]
    assert book.registered(registration(), now=0) == [push()]


def test_cancel_during_the_write_is_answered_when_it_has_ended() -> None:
    """ "Released" while a write is in flight would let decode reuse blocks that are being written."""
    book = ledger()
    book.finished(RID, BLOCKS, TOKEN, now=0)
    book.registered(registration(), now=0)
    start(book, push())
    assert book.cancelled(cancel(), now=1) == []
    assert book.settled(push(), 300, None, now=2) == [Release(RID, "aborted"), reply("aborted")]


def test_repeated_registration_during_the_write_is_not_answered() -> None:
    """The write's completion is the answer to the repeat too."""
    book = ledger()
    book.finished(RID, BLOCKS, TOKEN, now=0)
    book.registered(registration(), now=0)
    start(book, push())
    assert book.registered(registration(), now=1) == []


def test_repeated_registration_before_the_prompt_is_not_answered() -> None:
    """A "released" for the repeat would unfence the blocks that are going to be written."""
    book = ledger()
    book.registered(registration(), now=0)
    assert book.registered(registration(), now=1) == []
    assert book.finished(RID, BLOCKS, TOKEN, now=2) == [push()]


def test_failed_write_releases_and_answers() -> None:
    """Once no write is in flight both sides get their blocks back."""
    book = ledger()
    book.finished(RID, BLOCKS, TOKEN, now=0)
    book.registered(registration(), now=0)
    start(book, push())
    assert book.settled(push(), 0, "push_failed", now=1) == [
        Release(RID, "push_failed"),
        reply("push_failed"),
    ]


def test_no_push_after_decodes_deadline() -> None:
    """A registration that is past its deadline when the prompt is done is answered instead."""
    book = ledger()
    book.registered(registration(deadline=10), now=0)
    assert book.finished(RID, BLOCKS, TOKEN, now=10) == [Release(RID, "deadline"), reply("deadline")]


def test_registration_without_a_prefill_leg_ends_at_its_deadline() -> None:
    """A leg that never arrives leaves nothing behind, and one that arrives late is not held."""
    book = ledger()
    book.registered(registration(deadline=10), now=0)
    assert book.tick(now=9) == []
    assert book.tick(now=10) == [reply("deadline")]
    assert not book.outstanding
    assert book.finished(RID, BLOCKS, TOKEN, now=11) == [Release(RID, "deadline")]


def test_expired_lease_refuses_the_late_registration() -> None:
    """Blocks that vLLM has given back are never pushed from."""
    book = ledger()
    book.finished(RID, BLOCKS, TOKEN, now=0)
    book.lease_expired(RID, now=30)
    assert book.registered(registration(), now=31) == [reply("lease_expired")]


def test_abandoned_blocks_are_released_once() -> None:
    """An abort after prefill's end gives the blocks back; a second one does nothing."""
    book = ledger()
    book.finished(RID, BLOCKS, TOKEN, now=0)
    assert book.abandoned(RID, "aborted", now=1) == [Release(RID, "aborted")]
    assert book.abandoned(RID, "aborted", now=1) == []


def test_abandoning_a_write_in_flight_does_nothing() -> None:
    """Its blocks are read by the write until it is done."""
    book = ledger()
    book.finished(RID, BLOCKS, TOKEN, now=0)
    book.registered(registration(), now=0)
    start(book, push())
    assert book.abandoned(RID, "aborted", now=1) == []
    assert book.is_pushing(RID)


def test_registrations_of_one_id_are_bounded() -> None:
    """A peer cannot fill prefill's memory under one request id."""
    book = ledger()
    answers = [book.registered(registration(f"{n:032x}"), now=0) for n in range(5)]
    assert answers[:4] == [[], [], [], []]
    assert answers[4] == [reply("too_many_registrations", f"{4:032x}")]


def test_tombstones_expire() -> None:
    """After its time an id is unknown again, so a registration waits (for its own deadline)."""
    book = ledger(ttl_s=10)
    book.ended(RID, "finished_aborted", now=0)
    book.tick(now=10)
    assert book.registered(registration(), now=10) == []


def test_tombstones_are_bounded_and_the_oldest_goes_first() -> None:
    """A flood of ended requests keeps the newest `limit`."""
    book = ledger(limit=2)
    for number in range(3):
        book.ended(f"r{number}", "finished_aborted", now=number)
    assert book.registered(registration(request_id="r0"), now=3) == []
    assert book.registered(registration(request_id="r1"), now=3) != []


EVENTS = ("finished", "registered", "cancelled")


@pytest.mark.parametrize("order", list(itertools.permutations(EVENTS)), ids="-".join)
def test_every_order_of_finish_register_cancel_settles(order: tuple[str, ...]) -> None:
    """In any order: prefill's blocks come back once, and decode gets one end for its blocks."""
    book = ledger()
    actions = []
    for event in order:
        if event == "finished":
            actions += book.finished(RID, BLOCKS, TOKEN, now=0)
        elif event == "registered":
            actions += book.registered(registration(), now=0)
        else:
            actions += book.cancelled(cancel(), now=0)
    for write in [action for action in actions if isinstance(action, Write)]:
        if book.starting(write, now=0)[0]:
            actions += book.settled(write, 0, None, now=1)
    assert sum(isinstance(action, Release) for action in actions) == 1
    assert any(isinstance(action, Reply) for action in actions)
    assert not book.outstanding


def chunk(start: int, *block_ids: int, last: bool = False) -> Chunk:
    return Chunk((start,), (block_ids,), last)


def write(
    number: int, local: tuple[int, ...], remote: tuple[int, ...], streamed: bool = True, start: int = 0
) -> Write:
    return Write(RID, number, (local,), (remote,), registered_from(start), streamed)


def registered_from(start: int, *, block_size: int = 16) -> Registration:
    """Decode has the first `start` of three blocks in its own cache."""
    return Registration(RID, TOKEN, PEER, ((7, 8, 9)[start:],), (start,), (block_size,), 60.0, {})


def complete(num_bytes: int, tail_s: float, start: int = 0) -> Complete:
    return Complete(RID, registered_from(start), num_bytes, tail_s)


def test_chunks_are_written_as_they_are_computed() -> None:
    """Each chunk goes to decode's blocks of the same place; the notice follows the last write."""
    book = ledger()
    book.registered(registered_from(0), now=0)
    first, second = write(1, (1,), (7,)), write(2, (2, 3), (8, 9), streamed=False)
    assert book.computed(RID, TOKEN, chunk(0, 1), now=1) == [first]
    start(book, first, now=1)
    assert book.computed(RID, TOKEN, chunk(1, 2, 3, last=True), now=2) == [second]
    start(book, second, now=2)
    assert book.settled(second, 200, None, now=3) == []
    assert book.settled(first, 100, None, now=4) == [complete(300, tail_s=2)]
    assert book.finished(RID, BLOCKS, TOKEN, now=5) == [Release(RID, "pushed")]


def test_chunks_before_the_registration_go_together() -> None:
    """A late registration gets everything that is computed in one write."""
    book = ledger()
    assert book.computed(RID, TOKEN, chunk(0, 1), now=0) == []
    assert book.computed(RID, TOKEN, chunk(1, 2), now=1) == []
    assert book.registered(registered_from(0), now=2) == [write(1, (1, 2), (7, 8))]


def test_blocks_that_decode_has_are_skipped() -> None:
    """Decode's list starts at its third block: the chunk is cut there, and its blocks keep their place."""
    book = ledger()
    book.registered(registered_from(2), now=0)
    assert book.computed(RID, TOKEN, chunk(0, 1), now=1) == []
    last = write(1, (3,), (9,), streamed=False, start=2)
    assert book.computed(RID, TOKEN, chunk(1, 2, 3, last=True), now=2) == [last]


def test_decode_that_needs_no_block_gets_its_notice() -> None:
    """A complete prefix hit: nothing is written, and the notice comes when the prompt is done."""
    book = ledger()
    book.registered(registered_from(3), now=0)
    assert book.computed(RID, TOKEN, chunk(0, 1, 2), now=1) == []
    assert book.computed(RID, TOKEN, chunk(2, 3, last=True), now=2) == [complete(0, 0.0, start=3)]


def test_a_slow_link_gets_fewer_writes() -> None:
    """With two writes in flight the chunks that follow wait, and go together."""
    book = ledger()
    wide = Registration(RID, TOKEN, PEER, (tuple(range(70, 76)),), (0,), (16,), 60.0, {})
    book.registered(wide, now=0)
    sent = [book.computed(RID, TOKEN, chunk(place, place), now=0) for place in range(4)]
    assert [len(actions) for actions in sent] == [1, 1, 0, 0]
    first = sent[0][0]
    assert isinstance(first, Write)
    start(book, first)
    assert book.settled(first, 1, None, now=1) == [Write(RID, 3, ((2, 3),), ((72, 73),), wide, True)]


def test_preempted_blocks_are_written_again_after_the_old_writes() -> None:
    """NIXL keeps no order: a late old write would destroy what was computed anew."""
    book = ledger()
    book.registered(registered_from(0), now=0)
    old = write(1, (1, 2), (7, 8))
    assert book.computed(RID, TOKEN, chunk(0, 1, 2), now=0) == [old]
    start(book, old)
    book.preempted(RID)
    assert book.computed(RID, TOKEN, chunk(0, 4, 5, 6, last=True), now=1) == []
    anew = write(2, (4, 5, 6), (7, 8, 9), streamed=False)
    assert book.settled(old, 200, None, now=2) == [anew]
    start(book, anew, now=2)
    assert book.settled(anew, 300, None, now=3) == [complete(500, tail_s=2)]


def test_preemption_drops_writes_that_were_not_started() -> None:
    """Their source belongs to another request by now."""
    book = ledger()
    book.registered(registered_from(0), now=0)
    old = write(1, (1, 2), (7, 8))
    book.computed(RID, TOKEN, chunk(0, 1, 2), now=0)
    book.preempted(RID)
    assert book.starting(old, now=1) == (False, [])


def test_failure_of_an_old_write_does_not_matter() -> None:
    """What it should have written is written again."""
    book = ledger()
    book.registered(registered_from(2), now=0)
    old, anew = write(1, (3,), (9,), start=2), write(2, (6,), (9,), streamed=False, start=2)
    assert book.computed(RID, TOKEN, chunk(0, 1, 2, 3), now=0) == [old]
    start(book, old)
    book.preempted(RID)
    assert book.finished(RID, ((4, 5, 6),), TOKEN, now=1) == []
    assert book.settled(old, 0, "push_failed", now=2) == [anew]


def test_blocks_behind_the_prompt_are_left_out() -> None:
    """The finished request has one block more than the prompt fills: decode registered none for it."""
    book = ledger()
    book.computed(RID, TOKEN, chunk(0, 1, 2, 3, last=True), now=0)
    book.finished(RID, ((1, 2, 3, 4),), TOKEN, now=0)
    assert book.registered(registered_from(0), now=1) == [write(1, (1, 2, 3), (7, 8, 9), streamed=False)]


def test_unseen_change_of_blocks_counts_as_preemption() -> None:
    """The finished request has other blocks than the chunks said: they are all written, none is trusted."""
    book = ledger()
    book.registered(registered_from(0), now=0)
    book.computed(RID, TOKEN, chunk(0, 1), now=0)
    anew = write(2, (4, 5, 6), (7, 8, 9), streamed=False)
    assert book.finished(RID, ((4, 5, 6),), TOKEN, now=1) == [anew]


def test_chunk_that_does_not_follow_is_left_to_the_end() -> None:
    """A gap would be written to the wrong places."""
    book = ledger()
    book.registered(registered_from(0), now=0)
    assert book.computed(RID, TOKEN, chunk(1, 2), now=0) == []
    assert book.finished(RID, BLOCKS, TOKEN, now=1) == [push()]


def test_decode_is_warned_while_writes_are_in_flight() -> None:
    """An abort in mid-prompt is told at once; "released" follows the last write."""
    book = ledger()
    book.registered(registered_from(0), now=0)
    first = write(1, (1,), (7,))
    book.computed(RID, TOKEN, chunk(0, 1), now=0)
    start(book, first)
    assert book.ended(RID, "finished_aborted", now=1) == [Warn(RID, PEER, TOKEN, "finished_aborted")]
    assert book.settled(first, 100, None, now=2) == [reply("finished_aborted")]
    assert not book.outstanding


def test_one_failed_chunk_ends_the_push() -> None:
    """Later chunks are not written, and the finished prompt's blocks are released at once."""
    book = ledger()
    book.registered(registered_from(0), now=0)
    first = write(1, (1,), (7,))
    book.computed(RID, TOKEN, chunk(0, 1), now=0)
    start(book, first)
    assert book.settled(first, 0, "push_failed", now=1) == [reply("push_failed")]
    assert book.computed(RID, TOKEN, chunk(1, 2, 3, last=True), now=2) == []
    assert book.finished(RID, BLOCKS, TOKEN, now=3) == [Release(RID, "push_failed")]


def test_deadline_is_checked_before_each_write() -> None:
    """A chunk computed in time but started too late is not written."""
    book = ledger()
    book.registered(registered_from(0), now=0)
    first = write(1, (1,), (7,))
    book.computed(RID, TOKEN, chunk(0, 1), now=59)
    assert book.starting(first, now=60) == (False, [reply("deadline")])


def test_more_blocks_than_decode_registered_is_a_mismatch() -> None:
    """The two sides do not speak of the same prompt; nothing is written past decode's list."""
    book = ledger()
    book.registered(registered_from(0), now=0)
    assert book.computed(RID, TOKEN, chunk(0, 1, 2, 3, 4), now=0) == [reply("block_mismatch")]


@pytest.mark.parametrize(
    ("layout", "block_size"),
    [(GroupLayout(16, streamed=False), 16), (GroupLayout(16, streamed=True), 32)],
    ids=["group not streamed", "block sizes differ"],
)
def test_what_cannot_be_streamed_is_written_whole_at_the_end(layout: GroupLayout, block_size: int) -> None:
    """vLLM pairs such blocks itself, so it gets both lists as they are."""
    book = PrefillLedger((layout,), 100.0, 100)
    one_of_two = registered_from(1, block_size=block_size)
    book.registered(one_of_two, now=0)
    if layout.streamed:
        assert book.computed(RID, TOKEN, chunk(0, 1, 2), now=0) == []
    assert book.finished(RID, BLOCKS, TOKEN, now=1) == [
        Write(RID, 1, BLOCKS, ((8, 9),), one_of_two, streamed=False)
    ]


def complete_with(payload: bytes) -> Complete:
    return Complete(RID, registration(), 0, 0.0, payload)


def test_what_was_sampled_goes_with_the_completion() -> None:
    """Whether decode has registered by then or not."""
    book = ledger()
    assert book.sampled(RID, TOKEN, b"first", now=0) == []
    book.finished(RID, BLOCKS, TOKEN, now=0)
    (write,) = book.registered(registration(), now=0)
    start(book, write)
    assert complete_with(b"first") in book.settled(write, 0, None, now=0)


def test_preemption_takes_back_what_was_sampled() -> None:
    """The prompt is computed anew, and another token may be sampled."""
    book = ledger()
    book.sampled(RID, TOKEN, b"first", now=0)
    book.preempted(RID)
    book.sampled(RID, TOKEN, b"second", now=0)
    book.finished(RID, BLOCKS, TOKEN, now=0)
    (write,) = book.registered(registration(), now=0)
    start(book, write)
    assert complete_with(b"second") in book.settled(write, 0, None, now=0)


def test_nothing_is_kept_of_what_was_sampled_after_a_cancel() -> None:
    """Decode does not want it any more."""
    book = ledger()
    book.cancelled(cancel(), now=0)
    assert book.sampled(RID, TOKEN, b"first", now=0) == []
    assert not book.outstanding


def ask(*, registered: bool, token: str = TOKEN) -> Ask:
    return Ask(RID, token, registered, PEER)


def test_reservation_that_nothing_is_computed_for_is_given_up() -> None:
    """Decode needs the blocks; the leg that is computed later is not held for it."""
    book = ledger()
    book.registered(registration(), now=0)
    assert book.asked(ask(registered=True), now=1) == [reply("revoked")]
    assert not book.outstanding
    assert book.finished(RID, BLOCKS, TOKEN, now=2) == [Release(RID, "revoked")]


def test_reservation_is_kept_once_something_is_computed_for_it() -> None:
    """It comes to its end without anybody's help."""
    book = ledger()
    book.registered(registration(), now=0)
    (write,) = book.computed(RID, TOKEN, Chunk((0,), ((1,),), last=False), now=1)
    assert book.asked(ask(registered=True), now=2) == []
    assert book.starting(write, now=2) == (True, [])


def test_only_the_attempt_itself_gives_its_reservation_up() -> None:
    """A question with another token changes nothing."""
    book = ledger()
    book.registered(registration(), now=0)
    assert book.asked(ask(registered=True, token=OTHER), now=1) == []
    assert book.finished(RID, BLOCKS, TOKEN, now=2) == [push()]


def test_finished_prompt_is_offered_to_decode_that_asks() -> None:
    """Only while it waits for a registration, and only to its own attempt."""
    book = ledger()
    assert book.asked(ask(registered=False), now=0) == []
    book.computed(RID, TOKEN, Chunk((0,), ((1,),), last=False), now=1)
    assert book.asked(ask(registered=False), now=1) == []
    book.finished(RID, BLOCKS, TOKEN, now=2)
    assert book.asked(ask(registered=False, token=OTHER), now=2) == []
    assert book.asked(ask(registered=False), now=2) == [Offer(RID, PEER, TOKEN)]
    assert book.registered(registration(), now=3) == [push()]
    assert book.asked(ask(registered=False), now=3) == []
