"""The admin port: the page's files, its events, who may look, and how many."""

import asyncio
from typing import Any

import httpx
import pytest
from component.proxy.conftest import Start
from component.proxy.live_stack import Live, live_stack, step, tell_steps
from component.proxy.stack import until

from lockstep.bounce import Bounce
from lockstep.rpc.generated import lockstep_pb2 as pb
from proxy.live.app import STATIC
from proxy.live.viewers import MAX_VIEWERS

ASK: dict[str, Any] = {"model": "pico", "prompt": "Some words to say.", "max_tokens": 30}


@pytest.fixture
async def live(start: Start) -> Live:
    return await live_stack(start)


async def test_page_and_its_files_come_from_the_admin_port_only(live: Live) -> None:
    """All that the page names is there, asks nobody else for anything, and the API's port has no page."""
    async with httpx.AsyncClient(base_url=live.url, follow_redirects=True) as http:
        page = await http.get("/")
        assert page.url.path == "/lockstep/"
        assert "default-src 'self'" in page.headers["content-security-policy"]
        for name in (file.name for file in STATIC.iterdir()):
            assert (await http.get(f"/lockstep/{name}")).status_code == 200, name
    assert "//" not in page.text
    assert (await live.stack.http.get("/lockstep/")).status_code == 404
    assert (await live.stack.http.get("/lockstep/events")).status_code == 404


async def test_status_document_is_that_of_the_api(live: Live) -> None:
    """Both ports answer with the same document."""
    async with httpx.AsyncClient(base_url=live.url) as http:
        here = (await http.get("/lockstep/status")).json()
    there = (await live.stack.http.get("/lockstep/status")).json()
    assert here["proxy"].pop("uptime_s") > 0
    del there["proxy"]["uptime_s"]
    assert here == there


async def test_steps_as_the_nodes_tell_them(live: Live) -> None:
    """What came before the page was opened, and then what comes, with each rank's mode and cause."""
    tell_steps(live.decode, 0, step(0), step(1))
    await until(live.stack.client.flow.lanes.all, "the steps are there")
    async with live.events() as events:
        (before,) = await events.next("steps")
        assert (before["address"], before["global_rank"]) == (live.decode.address, 0)
        assert [one[:3] for one in before["steps"]] == [[0, "FULL", ""], [1, "FULL", ""]]
        tell_steps(live.decode, 1, step(2, "NONE", "short_row", idle=True))
        (after,) = await events.next("steps")
        assert after["global_rank"] == 1
        assert after["steps"] == [[2, "NONE", "short_row", 3, 1, 3, 6, True]]


async def test_steps_of_a_node_that_started_anew_replace_the_old_ones(live: Live) -> None:
    """It counts from 0 again, so the old ones are another process's."""
    tell_steps(live.decode, 0, step(700))
    await until(live.stack.client.flow.lanes.all, "the steps are there")
    await live.decode.stop()
    await until(lambda: not live.stack.cluster.pair(), "the proxy notices")
    await live.decode.start()
    await until(live.stack.cluster.pair, "it is back")
    assert live.stack.client.flow.lanes.all() == []


async def test_request_from_queue_to_end(live: Live) -> None:
    """Each phase of its attempt, when the KV had arrived, and the end; nothing of what was asked or said."""
    live.stack.prefill[0].set.pause_after_tokens = 0
    live.decode.set.pause_after_tokens = 3
    async with live.events() as events:
        assert (await events.next("requests"))["rows"] == []
        asking = asyncio.create_task(live.stack.http.post("/v1/completions", json=ASK))

        async def row_with(condition: Any) -> dict[str, Any]:
            while True:
                for row in (await events.next("requests"))["rows"]:
                    if row["attempts"] and condition(row, row["attempts"][-1]):
                        return dict(row)

        sent = await row_with(lambda row, attempt: attempt["phase"] == "dispatched")
        (attempt,) = sent["attempts"]
        assert attempt["prefill"]["address"] == live.stack.prefill[0].address
        assert attempt["decode"]["address"] == live.decode.address
        assert (attempt["prefilled_ms"], attempt["arrived_ms"], sent["ttft_ms"]) == (None, None, None)
        live.stack.prefill[0].set.go.set()
        held = await row_with(lambda row, attempt: attempt["arrived_ms"] is not None)
        assert held["attempts"][0]["prefilled_ms"] <= held["attempts"][0]["arrived_ms"]
        live.decode.set.go.set()
        ended = await row_with(lambda row, attempt: row["outcome"])
        assert (ended["outcome"], len(ended["attempts"])) == ("stop", 1)
        assert 0 < ended["ttft_ms"] < ended["age_ms"]
        usage = (await asking).json()["usage"]
        assert (ended["prompt_tokens"], ended["output_tokens"]) == (
            usage["prompt_tokens"],
            usage["completion_tokens"],
        )
        assert "words" not in str(ended)


async def test_attempt_that_ended_is_told_with_its_reason(live: Live) -> None:
    """The next one follows in the same row."""
    live.decode.set.ends = [(3, Bounce.PREEMPTED)]
    async with live.events() as events:
        await live.stack.http.post("/v1/completions", json=ASK)
        while True:
            rows = (await events.next("requests"))["rows"]
            if rows and rows[-1]["outcome"]:
                break
        first, second = rows[-1]["attempts"]
        assert first["end"]
        assert (second["reason"], second["end"]) == ("preempted", "")


async def test_ended_requests_are_there_for_who_opens_the_page_later(live: Live) -> None:
    """The last ones, although nobody looked when they ended."""
    await live.stack.http.post("/v1/completions", json=ASK)
    async with live.events() as events:
        (row,) = (await events.next("requests"))["rows"]
    assert (row["outcome"], len(row["attempts"])) == ("stop", 1)


async def test_nodes_are_asked_while_somebody_looks(live: Live) -> None:
    """The status comes by itself with what the nodes count; no node is asked when nobody looks."""
    live.decode.status = {"ranks": [pb.RankStatus(global_rank=1, load=pb.RankLoad(rank=1, num_running=7))]}
    async with live.events() as events:
        status = await events.next("status")
        await events.next("status")
    unknown, known = (rank["counts"] for rank in status["nodes"][1]["ranks"])
    assert (unknown, known["running_requests"]) == (None, 7)
    await until(lambda: not live.stack.client.flow.journal.watched, "the page is closed")


async def test_no_more_pages_than_are_allowed(live: Live) -> None:
    """One too many is told to come back; a place that was left is free again."""
    limits = httpx.Limits(max_connections=2 * MAX_VIEWERS)
    async with httpx.AsyncClient(base_url=live.url, timeout=20, limits=limits) as http:
        opened = [http.stream("GET", "/lockstep/events") for _ in range(MAX_VIEWERS)]
        for stream in opened:
            assert (await stream.__aenter__()).status_code == 200
        refused = await http.get("/lockstep/events")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        await opened.pop().__aexit__(None, None, None)
        async with asyncio.timeout(20):
            while True:
                async with http.stream("GET", "/lockstep/events") as again:
                    if again.status_code == 200:
                        break
        for stream in opened:
            await stream.__aexit__(None, None, None)


async def test_names_of_others_are_refused(live: Live) -> None:
    """A web page whose own name points to this machine cannot read what is here."""
    async with httpx.AsyncClient(base_url=live.url) as http:

        async def asked_as(host: str) -> int:
            return (await http.get("/lockstep/status", headers={"Host": host})).status_code

        assert [await asked_as(host) for host in ("localhost", "127.0.0.1:9", "[::1]:9")] == [200] * 3
        assert [await asked_as(host) for host in ("evil.example", "localhost.evil.example:9", "")] == [
            421
        ] * 3


async def test_no_page_without_the_flag(start: Start) -> None:
    """Nothing more listens, and nothing is kept for a page but what is small and bounded."""
    stack = await start()
    for _ in range(3):
        await stack.http.post("/v1/completions", json=ASK)
    assert stack.client.flow.journal.take_changed() == ([], 0)
