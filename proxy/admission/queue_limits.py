"""How many choices may wait in the proxy, and for how long; and when whoever is refused may come back."""

from dataclasses import dataclass

MOST_RETRY_AFTER_S = 60


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """`timeout_s` is from a choice's arrival until it is sent for the first time."""

    max_queued: int = 4096
    timeout_s: float = 300.0


def retry_after_s(longest_wait_s: float) -> int:
    """When a client that is refused may well come back: the wait of whoever is at the head of the queue.

    Whoever came now would wait about as long.
    """
    return max(1, min(MOST_RETRY_AFTER_S, round(longest_wait_s)))
