"""The reasons that are counted are a closed list, which docs/metrics.md has."""

import re
from pathlib import Path

from vllm.v1.request import RequestStatus

from kv_transfer.counters import KVCounters
from kv_transfer.reasons import REASONS

METRICS = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()


def test_a_reason_of_a_peer_is_no_new_label() -> None:
    """Whatever a notice says."""
    counters = KVCounters()
    for reason in ("deadline", "x" * 1000, "deadline", "y"):
        counters.add_reason("failed", reason)
    assert counters.snapshot()["failed"] == {"deadline": 2, "other": 2}


def test_the_page_has_every_reason() -> None:
    """And no others."""
    found = re.search(r"^\| KV reason \|.*\n\|[-|]+\n((?:\|.*\n)+)", METRICS, re.MULTILINE)
    assert found
    documented = [
        name for row in found[1].splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])
    ]
    assert sorted(documented) == sorted(REASONS)


def test_every_end_of_a_prompt_has_a_reason() -> None:
    """The connector passes vLLM's status on."""
    ends = {status.name.lower() for status in RequestStatus if RequestStatus.is_finished(status)}
    assert ends <= REASONS
