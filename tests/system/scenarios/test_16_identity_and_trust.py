"""Scenario 16: clients that call themselves the same, and clients that would direct the nodes.

Addresses that no peer could use, and ports that another node has, are refused at start:
tests/unit/test_config.py, tests/unit/node/test_start.py.
"""

import asyncio
from typing import Any

import httpx
import pytest
from system.harness import Stack, completion_body
from system.scenarios.bodies import LONG, QUEUED
from system.streams import Stream, stream_completion
from system.waiting import until

SAME = {"X-Request-Id": "everybody"}
FORGED: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "of-somebody-else",
    "remote_host": "192.0.2.1",
    "remote_port": 5600,
    "remote_request_id": "ls-0-1-t1",
    "tp_size": 1,
    "lockstep_token": "0" * 32,
    "lockstep_hand_off": True,
}


async def test_one_request_id_for_everybody(
    stack: Stack, scenario_reference: dict[str, dict[str, Any]]
) -> None:
    """Streams, whole answers and one that leaves in mid-answer: each has its own tokens."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=120, headers=SAME) as client:
        leaver = Stream()
        leaving = asyncio.create_task(stream_completion(client, LONG, leaver))
        await until(lambda: bool(leaver.token_ids), "the one that leaves has begun", timeout_s=30)
        streams = [asyncio.create_task(stream_completion(client, body)) for body in QUEUED]
        whole = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in QUEUED]
        leaving.cancel()
        ended = await asyncio.gather(*streams)
        answers = [answer.json() for answer in await asyncio.gather(*whole)]
    expected = [scenario_reference[f"queued-{n}"]["choices"][0]["token_ids"] for n in range(len(QUEUED))]
    assert [stream.token_ids for stream in ended] == expected
    assert [answer["choices"][0]["token_ids"] for answer in answers] == expected
    assert all(answer["id"] == "cmpl-everybody" for answer in answers)


@pytest.mark.parametrize("where", ["kv_transfer_params", "vllm_xargs"])
async def test_hand_off_fields_of_clients_are_refused_and_ours_never_shown(stack: Stack, where: str) -> None:
    """Else a client could have a node connect anywhere, or take the KV of another one's request."""
    fields = {where: FORGED if where == "kv_transfer_params" else {"kv_transfer_params": FORGED}}
    chat = {"model": "pico", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    prompt = completion_body([5, 6, 7, 8], max_tokens=4)
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
        for path, body in (("/v1/completions", prompt), ("/v1/chat/completions", chat)):
            for stream in (False, True):
                refused = await client.post(path, json={**body, **fields, "stream": stream})
                assert refused.status_code == 400, refused.text
                assert "192.0.2.1" not in refused.text
                assert "0" * 32 not in refused.text
            answer = await client.post(path, json=body)
            assert answer.json().get("kv_transfer_params") is None
            streamed = await client.post(path, json={**body, "stream": True})
            assert streamed.status_code == 200
            assert "lockstep" not in streamed.text
            assert "remote_" not in streamed.text + answer.text
