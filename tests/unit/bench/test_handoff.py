"""The hand-off's benchmark: what it reads of a stream, what --quick leaves out, what it finds wrong."""

import asyncio
import contextlib
import importlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def handoff(monkeypatch: pytest.MonkeyPatch) -> Any:
    """bench is a folder of scripts, not an installed package."""
    monkeypatch.syspath_prepend(REPOSITORY)
    return importlib.import_module("bench.handoff")


@pytest.fixture
def answers(handoff: Any) -> Any:
    return importlib.import_module("bench.handoff_answers")


@contextlib.asynccontextmanager
async def events(*events: dict[str, Any]) -> AsyncIterator[str]:
    """A server that streams these to whoever asks; yields its URL."""
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

    closed = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"{head}{len(text):x}\r\n{text}\r\n0\r\n\r\n".encode())
        with contextlib.suppress(ConnectionError):  # the client hangs up
            await reader.read()
            writer.close()
            await writer.wait_closed()
        closed.set()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.wait_for(closed.wait(), 5)


def chunk(*token_ids: int, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": "", "token_ids": list(token_ids), "finish_reason": finish_reason}]}


async def test_an_answer_is_read_by_chunks_and_timed(answers: Any) -> None:
    """The first step of decode is told from prefill's token by the chunk that it came in."""
    async with events(chunk(5), chunk(6, 7, 8), chunk(9, finish_reason="length")) as url:
        answer = await answers.ask(url, {})
    assert (answer.token_ids, answer.chunk_sizes) == ([5, 6, 7, 8, 9], [1, 3, 1])
    assert 0 < answer.ttft_s <= answer.total_s


async def test_an_answer_that_ends_with_an_error_is_no_measurement(answers: Any) -> None:
    """Half an answer would make the figures better."""
    async with events(chunk(5), {"error": {"code": 503}}) as url:
        with pytest.raises(RuntimeError, match="503"):
            await answers.ask(url, {})


def test_quick_leaves_the_other_systems_out(handoff: Any, tmp_path: Path) -> None:
    """One request of each length through one pair of nodes; the figures are written all the same."""
    options = handoff.arguments(["--quick", "--json", str(tmp_path / "figures.json")])
    assert (options.requests, options.skip_plain, options.skip_stepping) == (8, True, True)
    assert options.json == tmp_path / "figures.json"


def test_idle_time_has_to_fall_to_a_third(handoff: Any, answers: Any) -> None:
    """Of the stages that were measured; without them nothing is said of it."""
    answer = answers.Answer(token_ids=[5, 6, 7], chunk_sizes=[1, 2])
    on = answers.Mode([answer], [10.0], from_prefill=True)
    for idle_ms, found in ((3.0, []), (5.0, ["0.50 of the idle time is left"])):
        stages = {"stepping": {"idle": 10.0}, "parked": {"idle": idle_ms}}
        assert handoff.problems(on, on, 1.0, None, stages) == found
    assert handoff.problems(on, on, 1.0, [[5, 6, 7]], {}) == []


def test_client_ttft_is_held_against_prefills_engine(answers: Any) -> None:
    """Both from the client's request on; the proxy's own times do not count."""
    asked = [
        answers.Answer(asked_s=number, ttft_s=ttft_s) for number, ttft_s in ((100.0, 0.11), (200.0, 0.3))
    ]
    mode = answers.Mode([*asked, answers.Answer(asked_s=300.0, ttft_s=0.12)], [], from_prefill=True)
    assert mode.ttft_share([100.1, 200.1, 300.1]) == pytest.approx(1.2)
