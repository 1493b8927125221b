"""What a key may have in progress and use a minute, on a clock of the test's own."""

import pytest

from lockstep.errors import RateLimitedError
from proxy.admission.accounts import Account, Accounts
from proxy.admission.queue_limits import retry_after_s
from proxy.security.guard import ANONYMOUS
from proxy.security.keys import ApiKey


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def account(clock: Clock) -> Account:
    account = Account("web", clock)
    account.max_requests, account.tokens_per_minute = 2, 600
    return account


def test_only_so_many_requests_at_once(account: Account) -> None:
    account.enter()
    account.enter()
    with pytest.raises(RateLimitedError, match="2 requests in progress"):
        account.enter()
    account.leave()
    account.enter()


def test_tokens_come_back_evenly(account: Account, clock: Clock) -> None:
    """A minute's worth may go at once; what goes beyond is waited for."""
    account.check_tokens()
    account.take_tokens(590)
    account.check_tokens()
    account.take_tokens(110)
    with pytest.raises(RateLimitedError) as refused:
        account.check_tokens()
    assert refused.value.retry_after_s == 10  # 100 tokens at 10 a second
    clock.now_s += 9.9
    with pytest.raises(RateLimitedError):
        account.check_tokens()
    clock.now_s += 0.2
    account.check_tokens()


def test_rest_saves_up_no_more_than_a_minute(account: Account, clock: Clock) -> None:
    clock.now_s += 3600
    account.take_tokens(600)
    with pytest.raises(RateLimitedError):
        account.check_tokens()


def test_limits_of_the_key_go_before_those_of_the_flags() -> None:
    accounts = Accounts(8, 1000)
    own = accounts.of(ApiKey("own", b"1", max_requests=2))
    assert (own.max_requests, own.tokens_per_minute) == (2, 1000)


def test_an_exchanged_key_goes_on_with_its_account() -> None:
    """A file that was read again gives new keys for the old labels, and new limits."""
    accounts = Accounts(None, None)
    account = accounts.of(ApiKey("web", b"1"))
    assert accounts.of(ApiKey("web", b"2", max_requests=1)) is account
    assert account.max_requests == 1


def test_nobody_has_limits_where_no_keys_are_asked_for() -> None:
    """All clients would share them."""
    account = Accounts(1, 1).of(ANONYMOUS)
    account.take_tokens(100)
    account.check_tokens()
    account.enter()
    account.enter()


@pytest.mark.parametrize(("longest_wait_s", "seconds"), [(0.0, 1), (7.4, 7), (1e6, 60)])
def test_retry_after_is_about_the_wait_of_the_head(longest_wait_s: float, seconds: int) -> None:
    assert retry_after_s(longest_wait_s) == seconds
