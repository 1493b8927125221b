"""`/lockstep/status`, `lockstep status` and the proxy's metrics on the real stack."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec
from system.harness import Node, Stack, complete_all, completion_body
from system.prompts import prompts

from lockstep.status import KVCounts, RankCounts, StatusDocument

LOCKSTEP = str(Path(sys.executable).with_name("lockstep"))
LENGTHS = [20, 130, 300, 64]


def status(stack: Stack) -> StatusDocument:
    answer = httpx.get(f"{stack.url}/lockstep/status", timeout=10)
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=StatusDocument)


def counts(document: StatusDocument, role: str) -> dict[str, RankCounts]:
    """By global rank, as the label of the metrics has it."""
    (node,) = (node for node in document.nodes if node.role == role)
    assert (node.state, node.answer) == ("live", "ok")
    assert node.counts_age_s is not None
    assert node.counts_age_s < 5  # the engines are idle, so they answer each second
    found = {str(rank.global_rank): rank.counts for rank in node.ranks if rank.counts is not None}
    assert len(found) == len(node.ranks)
    return found


def kv(document: StatusDocument, role: str) -> list[KVCounts]:
    return [rank.kv for rank in counts(document, role).values()]


async def send(stack: Stack, seed: int, **extra: Any) -> None:
    """Four fresh prompts, two at a time."""
    bodies = [completion_body(prompt, **extra) for prompt in prompts(LENGTHS, seed=seed)]
    await complete_all(stack.url, bodies, concurrency=2)
    stack.wait_idle()


def equal_to_metrics(node: Node, of_status: dict[str, RankCounts]) -> None:
    """Each total of the document is that of the node's own /metrics."""
    for name, value in {
        "lockstep_draft_tokens_total": lambda rank: rank.draft_tokens,
        "lockstep_accepted_tokens_total": lambda rank: rank.accepted_tokens,
        "lockstep_kv_pushed_bytes_total": lambda rank: rank.kv.pushed_bytes,
        "lockstep_kv_block_bytes": lambda rank: rank.kv.block_bytes,
        "lockstep_decode_steps_total": lambda rank: sum(step.count for step in rank.steps),
    }.items():
        of_metrics = node.by_rank(name)
        assert {r: value(rank) for r, rank in of_status.items()} == dict.fromkeys(
            of_status, 0
        ) | of_metrics, name
    steps = {
        (rank, step.mode, step.cause): step.count
        for rank, rank_counts in of_status.items()
        for step in rank_counts.steps
    }
    series = [(dict(labels), n) for labels, n in node.metric("lockstep_decode_steps_total").items()]
    assert steps == {(named["rank"], named["mode"], named["cause"]): n for named, n in series}


async def test_counts_are_those_of_the_nodes_metrics(stack: Stack) -> None:
    """On both sides; what prefill pushed for fresh prompts is what decode received; steps were counted."""
    before = status(stack)
    await send(stack, seed=71, max_tokens=32, ignore_eos=True)
    after = status(stack)
    equal_to_metrics(stack.prefill, counts(after, "prefill"))
    equal_to_metrics(stack.decode, counts(after, "decode"))
    pushed = [sum(rank.pushed_bytes for rank in kv(document, "prefill")) for document in (before, after)]
    received = [sum(rank.received_bytes for rank in kv(document, "decode")) for document in (before, after)]
    # 1 + 2 + 3 + 1 blocks of 128 tokens, 655,360 bytes each (test_lockstep_decode.py).
    assert pushed[1] - pushed[0] == received[1] - received[0] == 7 * 655_360
    arrived = [sum(rank.received_requests for rank in kv(document, "decode")) for document in (before, after)]
    assert arrived[1] - arrived[0] == len(LENGTHS)
    decode = counts(after, "decode")
    assert set(decode) == {"0", "1"}
    assert all(
        sum(step.count for step in rank.steps if step.mode == "FULL") >= 20 for rank in decode.values()
    )
    assert not any(rank.running_requests or rank.waiting_requests for rank in decode.values())


async def test_every_request_is_counted_once(stack: Stack) -> None:
    """By outcome, attempt and time to the first token; n = 2 is two choices."""
    proxy = stack.node("proxy")

    def totals() -> dict[str, float]:
        return {
            name: sum(proxy.metric(name).values())
            for name in (
                "lockstep_proxy_requests_total",
                "lockstep_proxy_attempts_total",
                "lockstep_proxy_ttft_seconds_count",
                "lockstep_proxy_ttft_seconds_sum",
            )
        } | {
            "length": sum(
                n
                for labels, n in proxy.metric("lockstep_proxy_requests_total").items()
                if ("outcome", "length") in labels
            )
        }

    before = totals()
    await send(stack, seed=72, max_tokens=8, ignore_eos=True)
    await complete_all(
        stack.url, [completion_body([10, 11, 12], max_tokens=4, ignore_eos=True, n=2, temperature=1)], 1
    )
    grown = {name: value - before[name] for name, value in totals().items()}
    ttft_sum_s = grown.pop("lockstep_proxy_ttft_seconds_sum")
    assert set(grown.values()) == {len(LENGTHS) + 2}, grown
    assert 0 < ttft_sum_s < 60
    proxy_status = status(stack).proxy
    assert (
        sum(proxy_status.requests_by_outcome.values())
        == before["lockstep_proxy_requests_total"] + len(LENGTHS) + 2
    )
    assert (proxy_status.in_flight_requests, proxy_status.queued_requests) == (0, 0)


def test_command_prints_the_document_and_tables(stack: Stack) -> None:
    """--json parses to the same nodes; the table has a row for each of the three ranks."""
    outputs = [
        subprocess.run(
            [LOCKSTEP, "status", "--url", stack.url, *flags], capture_output=True, timeout=60, check=True
        ).stdout
        for flags in (["--json"], [])
    ]
    document = msgspec.json.decode(outputs[0], type=StatusDocument)
    assert [node.instance_id for node in document.nodes] == [node.instance_id for node in status(stack).nodes]
    assert document.proxy.served_models == ["pico"]
    lines = outputs[1].decode().splitlines()
    assert lines[0].startswith(f"pico at {stack.url}: ready, ")
    assert max(map(len, lines)) <= 100
    ranks = [" ".join(line.split()[1:3]) for line in lines if line[:2].strip().isdigit()]
    assert [rank for rank in ranks if rank.split()[0] in ("prefill", "decode")] == [
        "prefill 0",
        "decode 0",
        "decode 1",
    ]
