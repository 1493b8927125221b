"""Turns what one run of the full-graph benchmark saw into figures and a table."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.counters import Counters, grown
from bench.observer.records import RankRecord, busy_steps, mismatches
from bench.replay import Answer, compare
from bench.trace import Kind

MOST_EXAMPLES = 10


def result(
    name: str,
    ranks: Mapping[int, RankRecord],
    before: Counters,
    after: Counters,
    answers: Sequence[Answer],
    expected: dict[str, list[int]],
    play_s: float,
) -> dict[str, Any]:
    """All figures of one system, as JSON."""
    metric = after.steps_since(before)
    found = mismatches(list(ranks.values()))
    comparison = compare(answers, expected)
    drafts, accepted = after.drafts - before.drafts, after.accepted - before.accepted
    busy = busy_steps(list(ranks.values()))
    return {
        "system": name,
        "busy_steps": busy.total(),
        "busy_full_percent": 100 * busy["FULL"] / busy.total(),
        "ranks": {str(number): _rank(rank, metric.get(number, Counter())) for number, rank in ranks.items()},
        "agreements_that_differ": len(found),
        "agreements_that_differ_first": found[:MOST_EXAMPLES],
        "step_records_dropped": after.dropped_since(before),
        "output_tokens_per_s": sum(len(answer.token_ids) for answer in answers) / play_s,
        "seconds": play_s,
        "requests": len(answers),
        "outputs_compared": comparison.compared,
        "outputs_equal": comparison.equal,
        "outputs_different": comparison.different[:MOST_EXAMPLES],
        "disconnected": comparison.partly,
        "disconnected_equal_so_far": comparison.partly_equal,
        "failed": comparison.failed[:MOST_EXAMPLES],
        "num_failed": len(comparison.failed),
        "failed_loads": Counter(a.finish_reason for a in answers if a.item.kind is Kind.FAILED_LOAD),
        "draft_tokens": int(drafts),
        "accepted_tokens": int(accepted),
        "padded_arrivals_by_metric": int(after.padded - before.padded),
        "reentries_by_metric": int(after.reentries - before.reentries),
        "bounced": grown(after.bounced, before.bounced),
        "violations": grown(after.violations, before.violations),
        "attempts": grown(after.attempts, before.attempts),
    }


def _rank(rank: RankRecord, metric: Counter[str]) -> dict[str, Any]:
    steps = rank.steps()
    by_mode: Counter[str] = Counter()
    for mode_and_cause, count in metric.items():
        by_mode[mode_and_cause.split(" ")[0]] += count
    arrivals = [step for step in rank.first_steps if not step.resumed]
    return {
        "steps": steps.total(),
        "full_steps": steps["FULL"],
        "full_percent": 100 * steps["FULL"] / steps.total(),
        "steps_by_mode": steps,
        "steps_by_metric": metric,
        "metric_equals_observer": by_mode == steps,
        "work_steps": rank.count("target", "work"),
        "idle_steps": rank.count("target", "idle"),
        "draft_agreements": rank.count("draft", "work"),
        "idle_draft_agreements": rank.count("draft", "idle"),
        "other_agreements": sum(a.who == "context" or a.when == "startup" for a in rank.agreements),
        "arrivals": len(arrivals),
        "padded_arrivals": sum(step.padded for step in arrivals),
        "resumed_here": len(rank.first_steps) - len(arrivals),
        "preempted": rank.preempted,
        "steps_with_odd_rows": len(rank.odd_steps),
        "odd_rows_first": rank.odd_steps[:MOST_EXAMPLES],
        "local_tokens_most": max((step.local_tokens for step in rank.first_steps), default=0),
        "local_tokens": sum(step.local_tokens for step in rank.first_steps),
    }


def show(results: Sequence[dict[str, Any]]) -> None:
    console = Console(width=150)
    table = Table(title="Steps of each decode rank, as the ranks agreed on them")
    for column in ("system", "rank", "steps", "full", "full %", "metric agrees", "not full, by cause"):
        table.add_column(column, justify="left" if column in ("system", "not full, by cause") else "right")
    for entry in results:
        for number, rank in entry["ranks"].items():
            causes = {name: count for name, count in rank["steps_by_metric"].items() if name != "FULL"}
            table.add_row(
                entry["system"],
                number,
                str(rank["steps"]),
                str(rank["full_steps"]),
                f"{rank['full_percent']:.2f}",
                "yes" if rank["metric_equals_observer"] else "NO",
                ", ".join(f"{name} {count}" for name, count in causes.items()),
            )
    console.print(table)
    for entry in results:
        console.print(_summary(entry), highlight=False)


def _summary(entry: dict[str, Any]) -> str:
    ranks = entry["ranks"].values()

    def total(name: str) -> int:
        return sum(int(rank[name]) for rank in ranks)

    first_steps = total("arrivals") + total("resumed_here")
    most = max(rank["local_tokens_most"] for rank in ranks)
    lines = [
        f"{entry['system']}: {entry['output_tokens_per_s']:.1f} output tokens/s, {entry['seconds']:.0f} s",
        f"equal to the reference {entry['outputs_equal']} of {entry['outputs_compared']}, of the "
        f"disconnected {entry['disconnected_equal_so_far']} of {entry['disconnected']} so far; failed "
        f"{entry['num_failed']}",
        f"{entry['busy_steps']} steps with work on a rank, of them full {entry['busy_full_percent']:.2f} %; "
        f"steps of ranks with work {total('work_steps')}, idle {total('idle_steps')}; draft agreements "
        f"{total('draft_agreements')}, idle {total('idle_draft_agreements')}; "
        f"{entry['agreements_that_differ']} agreements differ between the ranks",
        f"arrivals {total('arrivals')}, padded {total('padded_arrivals')}, preempted {total('preempted')}, "
        f"resumed on decode {total('resumed_here')}; tokens computed there per arrival: most {most}, mean "
        f"{total('local_tokens') / max(first_steps, 1):.2f}",
        f"drafts accepted {entry['accepted_tokens']} of {entry['draft_tokens']}; attempts "
        f"{entry['attempts']}; bounced {entry['bounced']}; failed loads {dict(entry['failed_loads'])}",
        f"by the scheduler's own count: padded {entry['padded_arrivals_by_metric']}, re-entries "
        f"{entry['reentries_by_metric']}, violations {entry['violations']}",
        *(f"failed: {failure}" for failure in entry["failed"]),
        *(f"different: {difference}" for difference in entry["outputs_different"]),
    ]
    return "\n  ".join(lines)
