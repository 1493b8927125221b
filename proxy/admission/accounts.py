"""What each API key has in progress and how many tokens it has left, in this process."""

import math
import time
from collections.abc import Callable
from contextvars import ContextVar

from lockstep.errors import RateLimitedError
from proxy.security.guard import ANONYMOUS
from proxy.security.keys import ApiKey

_TOO_MANY_RETRY_S = 1


class Account:
    """One key's. Tokens come back evenly over each minute, up to a minute's worth.

    Tokens are taken when they are known: a prompt's when the request starts, an answer's when it ends. That
    may leave a debt, and the next request waits until it is paid back.
    """

    def __init__(self, label: str, now: Callable[[], float] = time.monotonic) -> None:
        self.label = label
        self.max_requests: int | None = None
        self.tokens_per_minute: int | None = None
        self._in_progress = 0
        self._taken = 0.0
        """Of the minute's worth; it shrinks by itself."""
        self._now = now
        self._at_s = now()

    def enter(self) -> None:
        """A request came. Raises RateLimitedError, and then `leave` is not to be called."""
        if self.max_requests is not None and self._in_progress >= self.max_requests:
            raise RateLimitedError(
                f"This API key may have {self.max_requests} requests in progress.", _TOO_MANY_RETRY_S
            )
        self._in_progress += 1

    def leave(self) -> None:
        """That request is over."""
        self._in_progress -= 1

    def check_tokens(self) -> None:
        """Raises RateLimitedError while no token is left."""
        limit = self.tokens_per_minute
        if limit is None:
            return
        self._give_back()
        if self._taken >= limit:
            wait_s = (self._taken - limit) * 60 / limit
            raise RateLimitedError(
                f"This API key may use {limit} tokens a minute.", max(1, math.ceil(wait_s))
            )

    def take_tokens(self, tokens: int) -> None:
        """So many were used."""
        if self.tokens_per_minute is not None:
            self._give_back()
            self._taken += tokens

    def _give_back(self) -> None:
        now = self._now()
        back = (self.tokens_per_minute or 0) * (now - self._at_s) / 60
        self._at_s, self._taken = now, max(0.0, self._taken - back)


class Accounts:
    """By label, so that a key that was exchanged goes on with what the one before has used."""

    def __init__(self, max_requests: int | None, tokens_per_minute: int | None) -> None:
        """The limits of keys that have none of their own."""
        self._max_requests = max_requests
        self._tokens_per_minute = tokens_per_minute
        self._accounts: dict[str, Account] = {}

    def of(self, key: ApiKey) -> Account:
        """With the key's present limits; where no keys are asked for, nobody has any."""
        account = self._accounts.get(key.label)
        if account is None:
            account = self._accounts[key.label] = Account(key.label)
        if key is not ANONYMOUS:
            account.max_requests = key.max_requests or self._max_requests
            account.tokens_per_minute = key.tokens_per_minute or self._tokens_per_minute
        return account


current_account: ContextVar[Account | None] = ContextVar("current_account", default=None)
"""Whose request the one at hand is; None outside of requests."""
