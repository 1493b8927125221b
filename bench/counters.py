"""Owns what is read from a stack's own metrics before and after a run, and the difference."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.harness import Series, Stack

STEPS = "lockstep_decode_steps_total"
DROPPED = "lockstep_step_records_dropped_total"
DRAFTS = "lockstep_draft_tokens_total"
ACCEPTED = "lockstep_accepted_tokens_total"
PADDED = "lockstep_decode_padded_arrivals_total"
BOUNCED = "lockstep_decode_bounced_total"
VIOLATIONS = "lockstep_decode_violations_total"
REENTRIES = "lockstep_decode_reentries_total"
ATTEMPTS = "lockstep_proxy_attempts_total"


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals of the decode node and the proxy at one moment."""

    steps: Series
    dropped: dict[str, float]
    drafts: float
    accepted: float
    padded: float
    reentries: float
    bounced: dict[str, float]
    violations: dict[str, float]
    attempts: dict[str, float]

    @classmethod
    def of(cls, stack: Stack) -> "Counters":
        decode = stack.decode
        return cls(
            steps=decode.metric(STEPS),
            dropped=decode.by_rank(DROPPED),
            drafts=sum(decode.by_rank(DRAFTS).values()),
            accepted=sum(decode.by_rank(ACCEPTED).values()),
            padded=sum(decode.by_rank(PADDED).values()),
            reentries=sum(decode.by_rank(REENTRIES).values()),
            bounced=_by_label(f"{decode.http_url}/metrics", BOUNCED, "reason"),
            violations=_by_label(f"{decode.http_url}/metrics", VIOLATIONS, "cause"),
            attempts=_by_label(f"{stack.url}/metrics", ATTEMPTS, "reason"),
        )

    def steps_since(self, before: "Counters") -> dict[int, Counter[str]]:
        """By rank: "FULL" or "NONE (cause)" to steps."""
        steps: dict[int, Counter[str]] = {}
        for labels, value in self.steps.items():
            named = dict(labels)
            name = named["mode"] if not named["cause"] else f"{named['mode']} ({named['cause']})"
            new = int(value - before.steps.get(labels, 0.0))
            if new:
                steps.setdefault(int(named["rank"]), Counter())[name] += new
        return steps

    def dropped_since(self, before: "Counters") -> int:
        return int(sum(self.dropped.values()) - sum(before.dropped.values()))


def grown(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, int]:
    """What is new, without what is not."""
    new = {name: int(value - before.get(name, 0.0)) for name, value in after.items()}
    return {name: value for name, value in new.items() if value}


def _by_label(url: str, name: str, label: str) -> dict[str, float]:
    text = httpx.get(url, timeout=10, follow_redirects=True).text
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                key = sample.labels[label]
                totals[key] = totals.get(key, 0.0) + sample.value
    return totals
