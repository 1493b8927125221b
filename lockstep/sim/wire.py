"""What stands for the KV transfer between simulated nodes: registrations go one way, answers the other."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec

MAX_MESSAGE_BYTES = 64 * 1024


class Register(msgspec.Struct, tag="register"):
    """Decode has blocks for a request and waits for its KV."""

    request_id: str
    engine_id: str
    token: str


class Cancel(msgspec.Struct, tag="cancel"):
    """Decode does not want it any more."""

    request_id: str


class Pushed(msgspec.Struct, tag="pushed"):
    """All of the KV is there."""

    request_id: str


class Refused(msgspec.Struct, tag="refused"):
    """It will not come."""

    request_id: str
    reason: str


ToPrefill = Register | Cancel
ToDecode = Pushed | Refused

_encoder = msgspec.msgpack.Encoder()


def send(writer: asyncio.StreamWriter, message: ToPrefill | ToDecode) -> None:
    """Queue a message; lost where the connection has ended, which the other side sees by itself."""
    body = _encoder.encode(message)
    writer.write(len(body).to_bytes(4, "big") + body)


async def received(reader: asyncio.StreamReader, kind: Any) -> AsyncIterator[Any]:
    """The messages of one side until the connection ends, however it ends.

    Raises ValueError for one that is too long, msgspec.MsgspecError for one that is none of `kind`.
    """
    decoder = msgspec.msgpack.Decoder(kind)
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            length = int.from_bytes(await reader.readexactly(4), "big")
            if length > MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {length} bytes")
            yield decoder.decode(await reader.readexactly(length))
