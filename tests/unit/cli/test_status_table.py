"""The tables of `lockstep status`: what is in them, and that they fit."""

import io
from dataclasses import replace

import pytest
from rich.console import Console
from unit.cli.status_documents import BUSY, COUNTS, KV, document, node, rank, usual

from lockstep.cli.status_table import status_tables
from lockstep.status import KVEvent, SchedulerCounts, StatusDocument, StepCount

LONG = "decode-0.decode.a-namespace-of-some-length.svc.cluster.local:50051"


def shown(status: StatusDocument, width: int = 100) -> list[str]:
    console = Console(record=True, width=width, file=io.StringIO())
    for part in status_tables(status, "http://h:8000"):
        console.print(part, highlight=False)
    return [line.rstrip() for line in console.export_text().splitlines()]


def row(lines: list[str], *begins: str) -> list[str]:
    """The cells of the row that begins so, split at runs of spaces."""
    return next(line.split() for line in lines if line.split()[: len(begins)] == [*begins])


def test_proxy_line() -> None:
    """Model, place, readiness, uptime; requests now and ended; mean time to the first token."""
    lines = shown(usual())
    assert lines[0] == "pico at http://h:8000: ready, up 3 min, Lockstep 0.1.0"
    assert lines[1] == (
        "Requests: 5 in flight (2 queued), ended: 12 stop, 1 disconnected; first token after 85 ms on average"
    )


def test_proxy_line_of_one_of_several_workers() -> None:
    """Each counts for itself, and another one may answer the next time."""
    status = usual()
    lines = shown(replace(status, proxy=replace(status.proxy, worker=2, workers=4)), width=140)
    assert lines[0].endswith(", Lockstep 0.1.0; worker 2 of 4, whose requests alone are shown")


def test_attempts_line() -> None:
    """Only when a request needed more than one: how many by reason, and what the client waited."""
    assert "Attempts" not in "".join(shown(usual()))
    counts = {"first": 18, "preempted": 3, "refused": 0, "decode_lost": 1}
    lines = shown(document([], attempts_by_reason=counts, attempt_gap_count=4, attempt_gap_sum_s=0.6))
    assert lines[2] == (
        "Attempts: 22, after the first: 3 preempted, 1 decode_lost; next token after 150 ms on average"
    )


def test_node_rows() -> None:
    """Role, state, model, K, block size, context and compatibility group."""
    assert row(shown(usual()), "1", "d:1") == [
        *("1", "d:1", "decode", "live", "pico", "2", "128", "2043", "0")
    ]


def test_rank_rows() -> None:
    """Load, our own requests, full-graph share rounded down, causes by number, drafts, bytes by direction."""
    lines = shown(usual())
    assert row(lines, "0", "prefill", "0") == [
        *("0", "prefill", "0", "3+1", "0", "25%", "-", "-", "-", "-", "1.31", "MB", "out")
    ]
    assert row(lines, "1", "decode", "0")[3:6] == ["3+1", "4", "25%"]
    assert row(lines, "1", "decode", "1") == [
        *("1", "decode", "1", "3+1", "0", "25%", "100,010", "99.9%"),
        *("peer", "8,", "short_row", "3", "75%", "5.24", "MB", "in"),
    ]


def test_all_steps_full_is_100_percent() -> None:
    """And only then."""
    full = replace(BUSY, steps=[StepCount("FULL", "", 7)])
    assert "100%" in row(shown(document([node("decode", "d:1", [rank(0, full)])])), "0", "decode", "0")


def test_trouble_is_said_in_words() -> None:
    """A proxy that is not ready, a node that is refused or does not answer, failed transfers."""
    kv = replace(
        KV, events=[KVEvent("failed", "deadline", 3), KVEvent("released", "x", 9)], quarantined_blocks=2
    )
    status = document(
        [
            node("prefill", "p:1", [], state="refused", reason="block_size is 32", answer="not asked"),
            node("decode", "d:1", [rank(0, None)], answer="no answer", answer_reason="not within 2 s"),
            node("decode", "d:2", [rank(5, replace(COUNTS, kv=kv))]),
        ],
        ready=False,
        not_ready_because="prefill p:1: refused",
    )
    lines = shown(status)
    assert lines[0].startswith("pico at http://h:8000: not ready: prefill p:1: refused")
    text = " ".join(" ".join(lines).split())
    assert "refused: block_size is 32" in text
    assert "live, no answer: not within 2 s" in text
    assert row(lines, "1", "decode", "0") == ["1", "decode", "0", "-", "0", *"------"]
    assert "KV of decode rank 5 at d:2: 3 failed (deadline), 2 blocks in quarantine" in lines


def test_what_the_decode_scheduler_did_is_a_line_of_its_own() -> None:
    """Only where it did something."""
    scheduled = SchedulerCounts(0, 0, 1200, 3, 2400, {"lockstep_preempted": 4}, {"short_drafts": 2})
    nothing = SchedulerCounts(0, 0, 0, 0, 0, {}, {})
    ranks = [rank(0, replace(COUNTS, scheduler=scheduled)), rank(1, replace(COUNTS, scheduler=nothing))]
    lines = shown(document([node("decode", "d:1", ranks)]), width=200)
    assert [line for line in lines if line.startswith("Rows of")] == [
        "Rows of decode rank 0 at d:1: 1,200 padded arrivals; handed back 4 lockstep_preempted; "
        "not 1 + K wide 2 short_drafts"
    ]


@pytest.mark.parametrize("address", ["127.0.0.1:50051", LONG])
def test_fits_100_columns(address: str) -> None:
    """With large numbers, many causes and a long address nothing is cut off: cells fold."""
    kv = replace(KV, received_bytes=987_654_321_000_000)
    steps = [StepCount("NONE", cause, 123_456) for cause in ("short_row", "long_row", "oversized", "peer")]
    big = replace(BUSY, steps=[StepCount("FULL", "", 10**10), *steps], kv=kv, running_requests=1024)
    lines = shown(document([node("decode", address, [rank(127, big)])], requests_by_outcome={"stop": 10**9}))
    assert max(map(len, lines)) <= 100
    assert "…" not in "".join(lines)
    assert row(lines, "0", "decode", "127")[3:8] == ["1024+1", "0", "25%", "10,000,493,824", "99.9%"]
