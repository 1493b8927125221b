"""The gate before a stream's first bytes, as an ASGI application sees it."""

import json
from typing import Any

import pytest

from proxy.first_byte import FirstByteGate

ERROR = {"error": {"message": "m", "type": "Service Unavailable", "param": None, "code": 503}}
EVENT = f"data: {json.dumps(ERROR)}\n\n".encode()
DONE = b"data: [DONE]\n\n"


async def sent(content_type: bytes, *chunks: bytes) -> list[dict[str, Any]]:
    """What goes out for an answer of these chunks."""
    out: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", content_type), (b"x-request-id", b"7")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send(message: Any) -> None:
        out.append(dict(message))

    await FirstByteGate(app)({"type": "http"}, lambda: None, send)
    return out


async def test_error_as_first_event_becomes_a_status() -> None:
    """With the error's code, a JSON body of the right length, the other headers, and nothing after it."""
    start, body = await sent(b"text/event-stream; charset=utf-8", EVENT, DONE)
    assert start["status"] == 503
    headers = dict(start["headers"])
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"content-length"] == str(len(body["body"])).encode()
    assert headers[b"x-request-id"] == b"7"
    assert json.loads(body["body"]) == ERROR
    assert not body["more_body"]


async def test_error_after_the_first_event_stays_an_event() -> None:
    """The client has the 200 already."""
    messages = await sent(b"text/event-stream", b"data: {}\n\n", EVENT, DONE)
    assert messages[0]["status"] == 200
    assert [m["body"] for m in messages[1:]] == [b"data: {}\n\n", EVENT, DONE, b""]


@pytest.mark.parametrize("chunks", [(b"data: {}\n\n",), (b": ping\n\n", EVENT), ()])
async def test_other_streams_pass_unchanged(chunks: tuple[bytes, ...]) -> None:
    """Whatever else comes first, a keep-alive comment too, or nothing at all."""
    messages = await sent(b"text/event-stream", *chunks)
    assert messages[0]["status"] == 200
    assert b"".join(m["body"] for m in messages[1:]) == b"".join(chunks)


async def test_answer_that_is_no_stream_passes_unchanged() -> None:
    """Even if it looks like an error event."""
    messages = await sent(b"text/plain", EVENT)
    assert messages[0]["status"] == 200


async def test_error_without_a_status_passes_unchanged() -> None:
    """Only a code that is an HTTP error status can become one."""
    odd = b'data: {"error": {"code": "x"}}\n\n'
    messages = await sent(b"text/event-stream", odd)
    assert messages[0]["status"] == 200
