"""Decode's record of receives: blocks come back only behind the fence, and every wait has an end."""

from kv_transfer.decode_ledger import DecodeLedger, Done, Fail, SendCancel
from kv_transfer.notices import Completed, Failing, Released
from kv_transfer.params import PrefillPeer

PEER = PrefillPeer("p0", "127.0.0.1", 5600, 1)
TOKEN = "a" * 32
RID = "ls-1-0-a1"


def opened(*, sent: bool = True, deadline_s: float = 60.0) -> DecodeLedger:
    """A ledger with one receive of three blocks, opened at 0 s."""
    book = DecodeLedger(deadline_s, cancel_ack_timeout_s=5.0)
    book.opened(RID, PEER, TOKEN, num_blocks=3, now=0)
    if sent:
        assert book.sending(RID, now=0) == deadline_s
    return book


def completed(payload: bytes = b"", token: str = TOKEN) -> Completed:
    return Completed(RID, token, 1, payload)


def released(reason: str, token: str = TOKEN) -> Released:
    return Released(RID, token, reason, 1)


def send_cancel(reason: str, registered: bool = True) -> SendCancel:
    return SendCancel(RID, PEER, TOKEN, reason, registered)


def test_completion_delivers_the_kv() -> None:
    """One writer, one notice: received."""
    book = opened()
    assert book.completed(completed(), "w0", 1, now=3) == [Done(RID, received=True, seconds=3)]
    assert not book.outstanding


def test_all_writers_must_complete() -> None:
    """With two prefill workers the second notice counts, a repeat of the first does not."""
    book = opened()
    assert book.completed(completed(), "w0", 2, now=3) == []
    assert book.completed(completed(), "w0", 2, now=3) == []
    assert book.completed(completed(), "w1", 2, now=3) == [Done(RID, received=True, seconds=3)]


def test_release_fails_the_request_and_frees_the_blocks() -> None:
    """Prefill ended without a push: the client is told, the blocks are back."""
    book = opened()
    assert book.released(released("finished_aborted"), "w0", 1, now=3) == [
        Fail(RID, "finished_aborted"),
        Done(RID, received=False),
    ]


def test_release_by_one_of_two_writers_fails_but_keeps_the_fence() -> None:
    """The other writer may still write, so the blocks wait for it."""
    book = opened()
    assert book.released(released("push_failed"), "w0", 2, now=3) == [Fail(RID, "push_failed")]
    assert book.completed(completed(), "w1", 2, now=3) == [Done(RID, received=False)]


def test_release_with_another_token_is_ignored() -> None:
    """Somebody else's answer cannot unfence these blocks."""
    book = opened()
    assert book.released(released("forged", "b" * 32), "w0", 1, now=3) == []
    assert book.outstanding


def test_abort_waits_for_the_answer() -> None:
    """Blocks that prefill may be writing are not given back by the abort itself."""
    book = opened()
    assert book.aborted(RID, "aborted", now=1) == [send_cancel("aborted")]
    assert book.released(released("aborted"), "w0", 1, now=3) == [Done(RID, received=False)]


def test_abort_answered_by_the_completion() -> None:
    """The write had started: its completion is the answer, and nothing counts as received."""
    book = opened()
    book.aborted(RID, "aborted", now=1)
    assert book.completed(completed(), "w0", 1, now=3) == [Done(RID, received=False)]


def test_abort_before_the_registration_was_sent() -> None:
    """Nobody can write: the blocks are back at once, prefill is told, nothing is registered later."""
    book = opened(sent=False)
    assert book.aborted(RID, "aborted", now=1) == [
        send_cancel("aborted", registered=False),
        Done(RID, received=False),
    ]
    assert book.sending(RID, now=1) is None


def test_second_abort_does_nothing() -> None:
    """The failure that the worker reported comes back from the scheduler as an end of the request."""
    book = opened()
    book.aborted(RID, "aborted", now=1)
    assert book.aborted(RID, "aborted", now=1) == []


def test_deadline_fails_the_request_but_keeps_the_fence() -> None:
    """At the deadline the client hears of it; the blocks wait for prefill's answer."""
    book = opened(deadline_s=10)
    assert book.tick(now=9) == []
    assert book.tick(now=10) == [Fail(RID, "deadline"), send_cancel("deadline")]
    assert book.released(released("deadline"), "w0", 1, now=3) == [Done(RID, received=False)]


def test_deadline_before_the_registration_was_sent() -> None:
    """A handshake that hangs: failed and freed, prefill told."""
    book = opened(sent=False, deadline_s=10)
    assert book.tick(now=10) == [
        Fail(RID, "deadline"),
        send_cancel("deadline", registered=False),
        Done(RID, received=False),
    ]


def test_unanswered_cancel_is_repeated_and_quarantined() -> None:
    """Without an answer the blocks stay out of use, are counted, and the cancel is sent again."""
    book = opened()
    book.aborted(RID, "aborted", now=0)
    assert book.quarantined(now=5) == (0, 0)
    assert book.tick(now=4.9) == []
    assert book.tick(now=5) == [SendCancel(RID, PEER, TOKEN, "aborted", True, repeated=True)]
    assert book.tick(now=5.1) == []
    assert book.quarantined(now=5.1) == (1, 3)
    assert book.released(released("aborted"), "w0", 1, now=3) == [Done(RID, received=False)]
    assert book.quarantined(now=6) == (0, 0)


def test_unreachable_prefill_fails_and_frees() -> None:
    """The handshake failed, so no registration exists anywhere."""
    book = opened(sent=False)
    assert book.unreachable(RID, "prefill_unreachable") == [
        Fail(RID, "prefill_unreachable"),
        Done(RID, received=False),
    ]


def test_refused_send_fails_but_keeps_the_fence() -> None:
    """An error of the send does not prove that the registration did not arrive."""
    book = opened()
    assert book.send_failed(RID, "registration_failed", now=1) == [
        Fail(RID, "registration_failed"),
        send_cancel("registration_failed"),
    ]
    assert book.outstanding


def test_proven_death_ends_the_quarantine() -> None:
    """A process that is gone writes nothing."""
    book = opened()
    book.aborted(RID, "aborted", now=0)
    assert book.proven_dead(RID) == [Done(RID, received=False)]


def test_notices_for_unknown_requests_do_nothing() -> None:
    """Late or repeated notices after the end are harmless."""
    book = opened()
    book.completed(completed(), "w0", 1, now=3)
    assert book.completed(completed(), "w0", 1, now=3) == []
    assert book.released(released("aborted"), "w0", 1, now=3) == []
    assert book.aborted(RID, "aborted", now=1) == []
    assert book.unreachable(RID, "x") == []
    assert book.proven_dead(RID) == []


def test_completion_before_the_own_registration_counts() -> None:
    """Another TP rank's registration was enough: this rank has the KV too, and registers no more."""
    book = opened(sent=False)
    assert book.completed(completed(), "w0", 1, now=3) == [Done(RID, received=True)]
    assert book.sending(RID, now=4) is None


def test_the_payload_comes_with_the_kv() -> None:
    """What prefill hands over besides the KV is given out when the receive is done."""
    book = opened()
    done = Done(RID, received=True, payload=b"first", seconds=3)
    assert book.completed(completed(b"first"), "w0", 1, now=3) == [done]


def test_completion_with_another_token_is_ignored() -> None:
    """Nobody else can declare these blocks full."""
    book = opened()
    assert book.completed(completed(token="b" * 32), "w0", 1, now=3) == []
    assert book.outstanding


def test_early_failure_tells_the_client_and_keeps_the_fence() -> None:
    """Prefill gave up with writes in flight: the request fails at once, its blocks wait for `Released`."""
    book = opened()
    assert book.failing(Failing(RID, TOKEN, "push_failed")) == [Fail(RID, "push_failed")]
    assert book.outstanding
    assert book.released(released("push_failed"), "w0", 1, now=3) == [Done(RID, received=False)]


def test_early_failure_with_another_token_is_ignored() -> None:
    """Nobody else can fail the request."""
    assert opened().failing(Failing(RID, "b" * 32, "forged")) == []


def test_every_writer_must_hand_over_the_same() -> None:
    """Decode could not go on from two tokens; the blocks are its own again once all have written."""
    book = opened()
    assert book.completed(completed(b"1"), "w0", 2, now=3) == []
    failed = [Fail(RID, "hand_off_mismatch"), Done(RID, received=False)]
    assert book.completed(completed(b"2"), "w1", 2, now=3) == failed


def test_writers_that_hand_over_nothing_leave_it_to_the_others() -> None:
    """Of a pipeline only the last stage samples."""
    book = opened()
    assert book.completed(completed(b"1"), "w0", 2, now=3) == []
    assert book.completed(completed(b""), "w1", 2, now=3) == [Done(RID, True, b"1", 3)]
