"""Turns a status document into tables for a terminal; they fit 100 columns."""

import math
from collections import Counter
from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from lockstep.status import (
    NodeDocument,
    ProxyDocument,
    RankCounts,
    RankDocument,
    SchedulerCounts,
    StatusDocument,
)

_STATE_STYLES = {"live": "green", "aside": "yellow", "away": "red", "refused": "red"}
_NOTHING = "-"


def status_tables(document: StatusDocument, url: str) -> Iterator[Text | Table]:
    """What to print, in order: the proxy, the nodes, their ranks, and what is to be known of single ranks."""
    yield _headline(document.proxy, url)
    yield _requests(document.proxy)
    if again := _further_attempts(document.proxy):
        yield Text(again)
    yield Text()
    yield _nodes(document)
    yield Text()
    yield _ranks(document.nodes)
    for node in document.nodes:
        for rank in node.ranks:
            if rank.counts is None:
                continue
            which = f"{node.role} rank {rank.global_rank} at {node.address}"
            if scheduled := _scheduled(rank.counts.scheduler):
                yield Text(f"Rows of {which}: {scheduled}")
            if trouble := _kv_trouble(rank.counts):
                yield Text(f"KV of {which}: {trouble}")


def _headline(proxy: ProxyDocument, url: str) -> Text:
    state = ("ready", "green") if proxy.ready else (f"not ready: {proxy.not_ready_because}", "red")
    text = Text(f"{', '.join(proxy.served_models)} at {url}: ")
    text.append(*state)
    text.append(f", up {_duration(proxy.uptime_s)}, Lockstep {proxy.version}")
    if proxy.workers > 1:
        text.append(f"; worker {proxy.worker} of {proxy.workers}, whose requests alone are shown")
    return text


def _requests(proxy: ProxyDocument) -> Text:
    ended = ", ".join(f"{n:,} {outcome}" for outcome, n in proxy.requests_by_outcome.items() if n)
    text = f"Requests: {proxy.in_flight_requests} in flight ({proxy.queued_requests} queued), "
    text += f"ended: {ended or 'none'}"
    if proxy.ttft_count:
        text += f"; first token after {proxy.ttft_sum_s / proxy.ttft_count * 1000:,.0f} ms on average"
    return Text(text)


def _further_attempts(proxy: ProxyDocument) -> str:
    """What kept answers waiting on the way; empty when each went through at once."""
    first = "first"
    again = ", ".join(
        f"{n:,} {reason}" for reason, n in proxy.attempts_by_reason.items() if n and reason != first
    )
    if not again:
        return ""
    text = f"Attempts: {sum(proxy.attempts_by_reason.values()):,}, after the first: {again}"
    if proxy.attempt_gap_count:
        gap_ms = proxy.attempt_gap_sum_s / proxy.attempt_gap_count * 1000
        text += f"; next token after {gap_ms:,.0f} ms on average"
    return text


def _nodes(document: StatusDocument) -> Table:
    table = _table(">#", "Node", "Role", "State", "Model", ">K", ">Block", ">Context", ">Group")
    for number, node in enumerate(document.nodes):
        served = node.description
        group = node.compatibility_group
        table.add_row(
            str(number),
            node.address,
            node.role,
            _state(node),
            *(
                (
                    served.model,
                    str(served.num_speculative_tokens),
                    str(served.block_size_tokens),
                    str(served.served_context_limit_tokens),
                )
                if served
                else (_NOTHING,) * 4
            ),
            _NOTHING if group is None else str(group),
        )
    return table


def _state(node: NodeDocument) -> Text:
    text = Text(node.state, style=_STATE_STYLES[node.state])
    if node.reason:
        text.append(f": {node.reason}")
    if node.answer == "no answer":
        text.append(f", no answer: {node.answer_reason}", style="red")
    return text


def _ranks(nodes: list[NodeDocument]) -> Table:
    """The first column says which row of the table of nodes: addresses may be long."""
    load, moved = (">Run+wait", ">Ours", ">KV use"), (">Accepted", ">KV moved")
    table = _table(">#", ">Rank", *load, ">Steps", ">Full", "Not full", *moved)
    for number, node in enumerate(nodes):
        for rank in node.ranks:
            table.add_row(str(number), f"{node.role} {rank.global_rank}", *_rank_cells(node, rank))
    return table


def _rank_cells(node: NodeDocument, rank: RankDocument) -> Iterator[str]:
    counts = rank.counts
    if counts is None:
        yield from (_NOTHING, str(rank.in_flight_requests), *(_NOTHING,) * 6)
        return
    yield f"{counts.running_requests}+{counts.waiting_requests}"
    yield str(rank.in_flight_requests)
    yield f"{counts.kv_cache_usage_ratio:.0%}"
    yield from _step_cells(counts)
    yield f"{counts.accepted_tokens / counts.draft_tokens:.0%}" if counts.draft_tokens else _NOTHING
    pushes = node.role == "prefill"
    yield f"{_bytes(counts.kv.pushed_bytes)} out" if pushes else f"{_bytes(counts.kv.received_bytes)} in"


def _step_cells(counts: RankCounts) -> Iterator[str]:
    """Number of steps, the share that ran under a full graph, and how many did not, by cause."""
    total = sum(step.count for step in counts.steps)
    full = sum(step.count for step in counts.steps if step.mode == "FULL")
    yield f"{total:,}" if total else _NOTHING
    # Rounded down: 100 % means all of them.
    yield f"{math.floor(full / total * 1000) / 10:g}%" if total else _NOTHING
    causes: Counter[str] = Counter()
    for step in counts.steps:
        if step.mode != "FULL":
            causes[step.cause or "unknown"] += step.count
    yield ", ".join(f"{cause} {n:,}" for cause, n in causes.most_common()) or _NOTHING


def _scheduled(counts: SchedulerCounts | None) -> str:
    """What the decode scheduler had to do to keep rows at 1 + K tokens; empty when there was nothing."""
    if counts is None:
        return ""
    parts = [f"{counts.padded_arrivals:,} padded arrivals"] if counts.padded_arrivals else []
    if counts.bounced_by_reason:
        bounced = ", ".join(f"{n:,} {reason}" for reason, n in counts.bounced_by_reason.items())
        parts.append(f"handed back {bounced}")
    if counts.violations_by_cause:
        broken = ", ".join(f"{n:,} {cause}" for cause, n in counts.violations_by_cause.items())
        parts.append(f"not 1 + K wide {broken}")
    return "; ".join(parts)


def _kv_trouble(counts: RankCounts) -> str:
    """Failed receives by reason and blocks in quarantine; empty when there is nothing."""
    parts = [
        f"{event.count:,} failed ({event.reason})" for event in counts.kv.events if event.kind == "failed"
    ]
    if counts.kv.quarantined_blocks:
        parts.append(f"{counts.kv.quarantined_blocks:,} blocks in quarantine")
    if counts.dropped_step_records:
        parts.append(f"{counts.dropped_step_records:,} step records dropped")
    return ", ".join(parts)


def _table(*headings: str) -> Table:
    """Headings that begin with ">" are of numbers: to the right, on one line. Cells of the others fold."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for heading in headings:
        if heading.startswith(">"):
            table.add_column(heading.removeprefix(">"), justify="right", no_wrap=True)
        else:
            table.add_column(heading, overflow="fold")
    return table


def _bytes(number: int) -> str:
    """In the largest decimal unit, three digits or so."""
    amount = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:,.1f} TB"


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if hours < 2 else f"{hours:.0f} h"
