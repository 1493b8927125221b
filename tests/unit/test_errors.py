"""The error tree: every class is known by name and says what a client sees."""

import lockstep.errors as errors


def test_every_error_class_travels_by_name() -> None:
    """A class that the wire does not know would reach the client as an internal error."""
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.LockstepError)
    }
    assert set(errors.ERROR_CLASSES) == defined


def test_retryable_errors_and_their_statuses() -> None:
    """A client library retries on 429, 503 and 504, never on 400."""
    for error in errors.ERROR_CLASSES.values():
        assert error.retryable == (error.http_status in (429, 503, 504))
    assert errors.WrongLegError.http_status == 400
    assert errors.NodeLostError.http_status == 503
    assert errors.DeadlineError.http_status == 504
