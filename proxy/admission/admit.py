"""Decides, before vLLM's front end registers a request, whether the client and the queue have room for it."""

from typing import Any

from lockstep.errors import RateLimitedError
from proxy.admission.accounts import current_account
from proxy.admission.door import retry_after
from proxy.flow import Flow
from proxy.metrics import Refusal
from proxy.security.guard import current_key


def admit(flow: Flow, params: Any, priority: int) -> int:
    """The priority that the request gets; `params` are vLLM's.

    Raises RateLimitedError for a key without tokens, OverloadedError for a queue without room.
    """
    account, best = current_account.get(), current_key.get().priority
    if account is not None:
        try:
            account.check_tokens()
        except RateLimitedError as error:
            flow.metrics.refused(Refusal.KEY_TOKENS)
            retry_after.get().seconds = error.retry_after_s
            raise
    priority = priority if best is None else max(priority, best)
    flow.make_room(getattr(params, "n", 1), priority)
    return priority
