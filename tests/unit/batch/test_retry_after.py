"""How long an endpoint asks to be left alone."""

import email.utils

import pytest

from lockstep.batch.asking import retry_after_s

NOW_S = 1_700_000_000.0


@pytest.mark.parametrize(
    ("value", "wait_s"),
    [
        (None, None),
        ("7", 7.0),
        (" 0 ", 0.0),
        ("soon", None),
        ("-1", None),
        (email.utils.formatdate(NOW_S + 30, usegmt=True), 30.0),
        (email.utils.formatdate(NOW_S - 30, usegmt=True), 0.0),
        ("99999999", 600.0),
    ],
)
def test_header_in_seconds_or_as_a_date(value: str | None, wait_s: float | None) -> None:
    """RFC 9110, 10.2.3. A wait without end would be one, so it is bounded."""
    assert retry_after_s(value, NOW_S) == wait_s
