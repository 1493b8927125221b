"""Reads from a proxy's log what became of one request: its attempts, and where each one broke off."""

import re
from dataclasses import dataclass
from pathlib import Path

_ENDED = re.compile(
    r": (?P<outcome>\w+), key=\S+ prompt_tokens=(\d+) output_tokens=(\d+) attempts=\d+\((?P<reasons>[\w,]*)\)"
)
_BROKEN = re.compile(r"attempt (\d+) ended while \w+: (?P<reason>\w+) \(.*\), output_tokens=(?P<tokens>\d+) ")


@dataclass(frozen=True)
class RequestLog:
    """One choice of one request.

    Attributes:
        outcome: as `lockstep_proxy_requests_total` has it.
        reasons: why each attempt was made, the first one's included.
        broken_at_tokens: tokens that had been generated when an attempt broke off, for each one that did.
    """

    outcome: str
    reasons: list[str]
    broken_at_tokens: list[int]


def request_log(path: Path, request_id: str) -> RequestLog:
    """`request_id` as sent in X-Request-Id; raises AssertionError while its last line is not there."""
    lines = [line for line in path.read_text().splitlines() if f"{request_id}" in line]
    broken = [match for line in lines if (match := _BROKEN.search(line))]
    ended = [match for line in lines if (match := _ENDED.search(line))]
    assert len(ended) == 1, f"{request_id}: {lines}"
    return RequestLog(
        outcome=ended[0]["outcome"],
        reasons=ended[0]["reasons"].split(","),
        broken_at_tokens=[int(match["tokens"]) for match in broken],
    )
