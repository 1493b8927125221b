"""The proxy's flags about attempts after the first one."""

from pydantic import Field

from lockstep.config import ServiceConfig
from proxy.retries.limits import RetryLimits

_DEFAULT = RetryLimits()


class RetryConfig(ServiceConfig):
    """A part of `ProxyConfig`."""

    retry_budget_ratio: float = Field(
        _DEFAULT.budget_ratio,
        ge=0,
        le=10,
        description="attempts after a failure that each new request adds to those that may be made; "
        "with none left a request that fails ends with an error",
    )
    retry_budget_min_per_s: float = Field(
        _DEFAULT.budget_min_per_s,
        ge=0,
        description="such attempts that may be made each second however few requests come; ten seconds' "
        "worth is there from the start, and is the most that is saved up",
    )
    retry_backoff_s: float = Field(
        _DEFAULT.backoff_s,
        ge=0,
        description="the longest wait before another attempt after two without a token; twice as long after "
        "each further one; each wait is drawn at random below that",
    )
    retry_backoff_max_s: float = Field(
        _DEFAULT.backoff_max_s, ge=0, description="the longest wait before any attempt"
    )
    breaker_failures: int = Field(
        _DEFAULT.breaker_failures,
        ge=1,
        description="failures in a row after which a prefill node or a decode group gets no more requests "
        "while there is another",
    )
    breaker_open_s: float = Field(
        _DEFAULT.breaker_open_s,
        gt=0,
        description="time after which such a node or group is tried with one request",
    )

    hedge_after_s: float | None = Field(
        _DEFAULT.hedge_after_s,
        gt=0,
        description="time after which a choice whose prompt is not computed is sent to another prefill rank "
        "as well, and the first of the two goes on; out of the retry budget, and not while choices wait; "
        "never if not given",
    )

    def retry_limits(self) -> RetryLimits:
        """What these flags say."""
        return RetryLimits(
            budget_ratio=self.retry_budget_ratio,
            budget_min_per_s=self.retry_budget_min_per_s,
            backoff_s=self.retry_backoff_s,
            backoff_max_s=self.retry_backoff_max_s,
            breaker_failures=self.breaker_failures,
            breaker_open_s=self.breaker_open_s,
            hedge_after_s=self.hedge_after_s,
        )
