"""Scenario 5: requests that grow beyond the decode pool lose their blocks and go back to prefill."""

import asyncio
import itertools
import uuid
from typing import Any

import httpx
import pytest
from system.harness import Stack
from system.proxy_log import request_log
from system.scenarios.bodies import K
from system.scenarios.tight_pools.bodies import GROWING
from system.step_records import step_records
from system.streams import Stream, stream_completion

DEADLINE_S = 120.0
BOUNCED = "lockstep_decode_bounced_total"


async def test_streams_go_on_as_if_nothing_had_happened(
    tight: Stack, scenario_reference: dict[str, dict[str, Any]]
) -> None:
    """Six growing requests on each rank: every stream is the reference's, though some were moved twice.

    Tokens, logprobs, penalties, bad words, finish and usage; and no decode rank computes a prompt, which
    would be a row of more than 1 + K tokens.
    """
    bounced_before, attempts_before = tight.decode.by_rank(BOUNCED), _attempts(tight)
    run = uuid.uuid4().hex
    names = [f"{run}-{rank}-{number}" for rank, number in itertools.product((0, 1), range(len(GROWING)))]
    async with (
        step_records(tight.decode.grpc_address) as log,
        httpx.AsyncClient(base_url=tight.url, timeout=DEADLINE_S) as client,
        asyncio.timeout(DEADLINE_S),
    ):
        streams = await asyncio.gather(
            *(
                stream_completion(
                    client,
                    body,
                    headers={"X-data-parallel-rank": str(rank), "X-Request-Id": f"{run}-{rank}-{number}"},
                )
                for rank, (number, body) in itertools.product((0, 1), enumerate(GROWING))
            )
        )
        await asyncio.to_thread(tight.wait_idle)
    for number, stream in enumerate(streams):
        body = GROWING[number % len(GROWING)]
        _check_stream(stream, scenario_reference[f"growing-{number % len(GROWING)}"], body)
    log.check_lockstep(num_ranks=2, width=1 + K)
    logs = [request_log(tight.state_dir / "logs" / "proxy.log", name) for name in names]
    assert {entry.outcome for entry in logs} == {"length"}
    assert all(set(entry.reasons) <= {"first", "preempted"} for entry in logs), logs
    moved = [entry.reasons.count("preempted") for entry in logs]
    assert max(moved) >= 2, f"none was preempted twice: {moved}"
    by_rank = {"0": sum(moved[: len(GROWING)]), "1": sum(moved[len(GROWING) :])}
    assert min(by_rank.values()) >= 2, f"a rank preempted hardly any: {moved}"
    bounced = tight.decode.by_rank(BOUNCED)
    assert {rank: bounced[rank] - bounced_before.get(rank, 0.0) for rank in bounced} == by_rank
    assert _attempts(tight) - attempts_before == sum(moved)
    assert not sum(tight.decode.by_rank("lockstep_decode_violations_total").values())


def _attempts(stack: Stack) -> float:
    """Attempts that followed a preemption."""
    attempts = stack.node("proxy").metric("lockstep_proxy_attempts_total")
    return sum(value for labels, value in attempts.items() if ("reason", "preempted") in labels)


def _check_stream(stream: Stream, expected: dict[str, Any], body: dict[str, Any]) -> None:
    choice = expected["choices"][0]
    assert stream.token_ids == choice["token_ids"]
    assert stream.text == choice["text"]
    assert (stream.done, stream.error, stream.finish_reason) == (True, None, "length")
    assert stream.usage is not None
    assert stream.usage["completion_tokens"] == body["max_tokens"] == len(stream.token_ids)
    assert stream.usage["prompt_tokens"] == len(body["prompt"])
    if "logprobs" in body:
        assert stream.logprobs == pytest.approx(choice["logprobs"]["token_logprobs"], abs=2e-3)
