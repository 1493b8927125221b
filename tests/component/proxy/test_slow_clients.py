"""Clients that stop: at a request's head, in its body, or reading. They are cut off, and nobody waits."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from component.proxy.conftest import Start
from component.proxy.stack import DEADLINE_S, Stack, refusals, until

from proxy.admission import http_protocol

ASK: dict[str, Any] = {"model": "pico", "prompt": "Some words.", "max_tokens": 4}
STALL_S = 0.7
LARGE: dict[str, Any] = {"prompt": [7] * 125, "max_tokens": 126, "n": 16}
"""Makes a stream of some 170 KB, of which 64 KiB and what the kernels take is kept."""


@pytest.fixture
async def impatient(start: Start) -> Stack:
    """A proxy that gives clients little time, and whose kernel takes little of an answer that is not read."""
    return await start("--slow-client-timeout-s", str(STALL_S), send_buffer_bytes=4096)


@contextlib.asynccontextmanager
async def connection(stack: Stack) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client that writes by hand, and whose kernel takes little either."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    address = (stack.http.base_url.host, stack.http.base_url.port)
    await asyncio.get_running_loop().sock_connect(sock, address)
    # asyncio reads as much as this, twice over, whether or not the test does.
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def request(body: bytes, **headers: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: h", "Content-Type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def is_cut_off(reader: asyncio.StreamReader) -> bytes:
    """What came before the end of the connection."""
    came = b""
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(4096):
                came += piece
    return came


async def serves_others(stack: Stack) -> None:
    assert (await stack.http.post("/v1/completions", json=ASK)).status_code == 200


async def test_client_that_does_not_read_its_stream_is_cut_off(impatient: Stack) -> None:
    """Its request ends on both nodes, what is kept for it is bounded, and nobody waits for it."""
    decode, prefill = impatient.decode[0], impatient.prefill[0]
    decode.set.pause_after_tokens = 120
    body = json.dumps({**ASK, **LARGE, "stream": True}).encode()
    async with connection(impatient) as (_, writer):
        writer.write(request(body, Content_Length=str(len(body))))
        await until(lambda: decode.num_paused == LARGE["n"], "all but the ends of the answers are there")
        decode.set.pause_after_tokens = None
        others = [asyncio.create_task(serves_others(impatient)) for _ in range(3)]
        await asyncio.gather(*others)
        assert decode.running  # not because it was over anyway
        await until(lambda: not decode.running, "decode is told")
        await until(lambda: len(prefill.aborted) >= LARGE["n"], "prefill is told")
    assert refusals(impatient) == {"slow_reader": 1}
    assert impatient.client.flow.num_in_flight == 0
    assert not impatient.front_end.output_processor.request_states
    await serves_others(impatient)


async def test_client_that_reads_slowly_gets_its_whole_answer(impatient: Stack) -> None:
    """Slower than it is made, but it goes on."""
    body = json.dumps({**ASK, **LARGE, "stream": True}).encode()
    came = b""
    async with connection(impatient) as (reader, writer):
        writer.write(request(body, Content_Length=str(len(body)), Connection="close"))
        async with asyncio.timeout(DEADLINE_S):
            while piece := await reader.read(8192):
                came += piece
                await asyncio.sleep(STALL_S / 20)
    assert b"data: [DONE]" in came
    assert refusals(impatient) == {}


async def test_answer_below_the_mark_does_not_hold_a_connection_for_ever(impatient: Stack) -> None:
    """uvicorn does not wait for it to be read, and then waits for ever for the connection to close."""
    body = json.dumps({**ASK, "prompt": [7] * 250, "prompt_logprobs": 1, "max_tokens": 1, "n": 4}).encode()
    async with connection(impatient) as (_, writer):
        whole = await impatient.http.post("/v1/completions", json=json.loads(body))
        assert 24_000 < len(whole.content) < 64_000
        writer.write(request(body, Content_Length=str(len(body)), Connection="close"))
        await until(lambda: refusals(impatient) == {"slow_reader": 1}, "it is cut off")
    await serves_others(impatient)


async def test_head_that_does_not_come(impatient: Stack) -> None:
    """uvicorn would wait for ever for what is missing of it, be it all."""
    async with connection(impatient) as (nothing, _), connection(impatient) as (half, writer):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\n")
        assert await asyncio.gather(is_cut_off(nothing), is_cut_off(half)) == [b"", b""]
    assert refusals(impatient) == {"slow_head": 2}
    await serves_others(impatient)


async def test_head_that_does_not_end(impatient: Stack) -> None:
    """uvicorn would keep all of it."""
    async with connection(impatient) as (reader, writer):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nX-Long: ")
        writer.write(b"x" * 600_000)
        assert await is_cut_off(reader) in (b"", http_protocol.TOO_LARGE_HEAD)
    assert refusals(impatient) == {"large_head": 1}
    await serves_others(impatient)


async def test_body_that_does_not_go_on(impatient: Stack) -> None:
    """One byte now and then is not going on."""
    async with connection(impatient) as (reader, writer):
        writer.write(request(b"{", Content_Length="1000"))
        cut = asyncio.create_task(is_cut_off(reader))
        while not cut.done():
            writer.write(b" ")
            await asyncio.wait((cut,), timeout=STALL_S / 4)
        assert await cut == b""
    assert refusals(impatient) == {"slow_body": 1}
    await serves_others(impatient)


async def test_slow_answers_and_idle_connections_are_nobodys_fault(impatient: Stack) -> None:
    """A client may wait for longer than it may keep others waiting, also between two requests."""
    impatient.decode[0].set.delay_s = 1.2 * STALL_S
    body = json.dumps({**ASK, "stream": True}).encode()
    async with connection(impatient) as (reader, writer), asyncio.timeout(DEADLINE_S):
        for _ in range(2):
            writer.write(request(body, Content_Length=str(len(body))))
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            await asyncio.sleep(1.2 * STALL_S)
    assert refusals(impatient) == {}
