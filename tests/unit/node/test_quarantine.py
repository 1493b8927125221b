"""When a node has so many KV blocks in quarantine that only a new start helps."""

from lockstep.node.quarantine import QuarantineWatch


def watch() -> QuarantineWatch:
    """Two ranks of 100 blocks, of which half may be in quarantine."""
    made = QuarantineWatch(0.5, patience_s=15.0)
    made.set_pools([100, 100])
    return made


def test_too_many_for_too_long_is_a_reason() -> None:
    """On any rank; the message has the numbers."""
    book = watch()
    assert book.exceeded([0, 51], now=10.0) == ""
    assert book.exceeded([0, 80], now=24.9) == ""
    assert book.exceeded([0, 60], now=25.0) == (
        "rank 1 has 60 of 100 KV blocks in quarantine and none comes back"
    )


def test_what_comes_back_in_between_is_none() -> None:
    """A peer that died with many writes is found out within seconds."""
    book = watch()
    book.exceeded([90, 0], now=10.0)
    assert book.exceeded([50, 0], now=20.0) == ""
    assert book.exceeded([90, 0], now=26.0) == ""
    assert book.exceeded([90, 0], now=41.0) != ""


def test_half_of_the_pool_is_not_too_many() -> None:
    """The limit itself is allowed, for any time."""
    book = watch()
    assert book.exceeded([50, 50], now=10.0) == ""
    assert book.exceeded([50, 50], now=1000.0) == ""
