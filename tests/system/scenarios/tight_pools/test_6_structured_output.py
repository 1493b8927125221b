"""Scenario 6: answers by a JSON schema and plain ones share a rank that preempts some of both."""

import asyncio
import itertools
import json
import uuid
from typing import Any

import httpx
import jsonschema
from system.harness import Stack, complete_all
from system.proxy_log import request_log
from system.scenarios.bodies import K
from system.scenarios.tight_pools.bodies import JSON, PLAIN, SCHEMA
from system.step_records import step_records
from system.streams import stream_completion

DEADLINE_S = 120.0
_KINDS = [(kind, number) for number in range(len(JSON)) for kind in ("json", "plain")]


async def test_every_answer_is_valid(tight: Stack, scenario_reference: dict[str, dict[str, Any]]) -> None:
    """Half JSON, half plain, on both ranks: all JSON is valid, and all tokens are as without the others."""
    run = uuid.uuid4().hex
    alone = await complete_all(tight.url, JSON, 1)
    expected = {("json", number): answer["choices"][0] for number, answer in enumerate(alone)} | {
        ("plain", number): scenario_reference[f"plain-{number}"]["choices"][0] for number in range(len(PLAIN))
    }
    bodies = {"json": JSON, "plain": PLAIN}
    asked = list(itertools.product((0, 1), _KINDS))
    names = [f"{run}-{rank}-{kind}-{number}" for rank, (kind, number) in asked]
    async with (
        step_records(tight.decode.grpc_address) as log,
        httpx.AsyncClient(base_url=tight.url, timeout=DEADLINE_S) as client,
        asyncio.timeout(DEADLINE_S),
    ):
        streams = await asyncio.gather(
            *(
                stream_completion(
                    client,
                    bodies[kind][number],
                    headers={"X-data-parallel-rank": str(rank), "X-Request-Id": name},
                )
                for name, (rank, (kind, number)) in zip(names, asked, strict=True)
            )
        )
        await asyncio.to_thread(tight.wait_idle)
    preempted = {"json": 0, "plain": 0}
    for name, (_, (kind, number)), stream in zip(names, asked, streams, strict=True):
        same = expected[kind, number]
        assert (stream.done, stream.error) == (True, None)
        assert (stream.token_ids, stream.finish_reason) == (same["token_ids"], same["finish_reason"])
        if kind == "json":
            assert stream.finish_reason == "stop"
            jsonschema.validate(json.loads(stream.text), SCHEMA)
        entry = request_log(tight.state_dir / "logs" / "proxy.log", name)
        preempted[kind] += entry.reasons.count("preempted")
    assert min(preempted.values()) >= 1, preempted
    log.check_lockstep(num_ranks=2, width=1 + K)
