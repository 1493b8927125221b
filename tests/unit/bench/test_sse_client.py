"""The benchmarks' client: what counts as a whole answer, and what does not."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = "data: [DONE]\n\n"


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Any:
    """bench is a folder of scripts, not an installed package."""
    monkeypatch.syspath_prepend(REPOSITORY)
    return importlib.import_module("bench.sse_client")


class Transport:
    """Stands for the socket: notes what was written and whether it was cut."""

    def __init__(self) -> None:
        self.written = b""
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True


def event(**choice: Any) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, **choice}]})}\n\n"


def chunk(text: str) -> bytes:
    """Of a chunked body."""
    return f"{len(text):x}\r\n{text}\r\n".encode()


def received(client: Any, *parts: bytes, stop_after_events: int | None = None) -> tuple[Any, Transport]:
    transport = Transport()
    stream = client.Stream(b"request", stop_after_events)
    stream.connection_made(transport)
    for part in parts:
        stream.data_received(part)
    return stream, transport


async def test_a_whole_answer(client: Any) -> None:
    """It ends with the last chunk, and its text is that of all events."""
    stream, transport = received(
        client, HEAD, chunk(event(text="a")), chunk(event(text="b")), chunk(DONE), b"0\r\n\r\n"
    )
    assert stream.ended.done()
    assert transport.written == b"request"
    assert stream.text() == "ab"
    assert 0 < stream.sent_s <= stream.first_event_s <= stream.last_event_s


async def test_an_answer_that_breaks_off_is_an_error(client: Any) -> None:
    """Without the last event, whatever has come before."""
    stream, _ = received(client, HEAD, chunk(event(text="a")))
    assert not stream.ended.done()
    stream.connection_lost(None)
    with pytest.raises(client.StreamError, match="broke off after 1 events"):
        stream.events()


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\nbusy", "503"),
        (HEAD + chunk('data: {"error": {"message": "no"}}\n\n') + chunk(DONE) + b"0\r\n\r\n", "no"),
    ],
)
async def test_errors_are_not_taken_for_answers(client: Any, answer: bytes, match: str) -> None:
    """Neither a status nor an event of the stream."""
    stream, _ = received(client, answer)
    stream.connection_lost(None)
    with pytest.raises(client.StreamError, match=match):
        stream.events()


async def test_a_stream_that_is_abandoned_keeps_what_it_was_told(client: Any) -> None:
    """But for the last event, which may be cut."""
    parts = [chunk(event(text=text)) for text in "abcd"]
    stream, transport = received(client, HEAD, *parts, stop_after_events=3)
    assert stream.abandoned
    assert transport.aborted
    assert stream.text() == "ab"


def test_what_is_sent_is_one_request(client: Any) -> None:
    """With its length, for exactly so many tokens."""
    head, _, body = client.completion("a b", 7).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert json.loads(body)["max_tokens"] == 7
    assert json.loads(body)["ignore_eos"] is True
