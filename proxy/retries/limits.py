"""The numbers that bound attempts after the first one."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """As the flags of `RetryConfig` say."""

    budget_ratio: float = 0.2
    budget_min_per_s: float = 10.0
    backoff_s: float = 0.1
    backoff_max_s: float = 2.0
    breaker_failures: int = 5
    breaker_open_s: float = 10.0
    hedge_after_s: float | None = None
