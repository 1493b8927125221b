"""What prefill and decode workers say to each other over NIXL notifications, besides the KV itself.

Decode registers its blocks (vLLM's PUSH_REG with our token and deadline in it) or cancels. Prefill's write
carries vLLM's completion notice; where there will be no (more) write it says `Released` instead, after which
decode may reuse the blocks. Every answer repeats the token of the message that it answers, so a forged
registration cannot make prefill release a request of somebody else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

NOTICE_PREFIX = b"LOCKSTEP:"


class NoticeError(ValueError):
    """A notification that does not follow this module; it is dropped and counted."""


class DecodePeer(msgspec.Struct, frozen=True):
    """Where one decode rank's side channel listens."""

    engine_id: str
    host: str
    port: int
    tp_size: int


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Decode to prefill: do not push. If decode has `registered` blocks it waits for the answer."""

    request_id: str
    token: str
    reason: str
    registered: bool
    peer: DecodePeer


class Released(msgspec.Struct, frozen=True, tag=True):
    """Prefill to decode: no write of this request is in flight and none will follow.

    `writers` is the prefill TP size, as in vLLM's completion notice, so that decode can count the answers.
    """

    request_id: str
    token: str
    reason: str
    writers: int


Notice = Cancel | Released


@dataclass(frozen=True, slots=True)
class Registration:
    """A decode rank's blocks for one request, as prefill received them.

    `payload` is vLLM's registration, as `_do_start_push_kv` takes it; `block_ids` holds one list per KV cache
    group. `deadline` is on prefill's own monotonic clock, in seconds.
    """

    request_id: str
    token: str
    peer: DecodePeer
    block_ids: tuple[tuple[int, ...], ...]
    deadline: float
    payload: Mapping[str, Any]


_encoder = msgspec.msgpack.Encoder()
_notice_decoder = msgspec.msgpack.Decoder(Notice)


class _RegistrationWire(msgspec.Struct):
    request_id: str
    lockstep_token: str
    lockstep_deadline_s: float
    decode_engine_id: str
    decode_host: str
    decode_port: int
    decode_tp_size: int
    local_block_ids: tuple[tuple[int, ...], ...]


def encode_notice(notice: Notice) -> bytes:
    return NOTICE_PREFIX + _encoder.encode(notice)


def decode_notice(data: bytes) -> Notice:
    """Raises NoticeError."""
    try:
        return _notice_decoder.decode(data[len(NOTICE_PREFIX) :])
    except msgspec.MsgspecError as error:
        raise NoticeError(str(error)) from error


def decode_registration(data: bytes, now: float) -> Registration:
    """Read vLLM's PUSH_REG payload (without its prefix), received at monotonic time `now`.

    Raises NoticeError, also for a registration without our token.
    """
    try:
        payload = msgspec.msgpack.decode(data)
        wire = msgspec.convert(payload, _RegistrationWire)
    except msgspec.MsgspecError as error:
        raise NoticeError(str(error)) from error
    return Registration(
        request_id=wire.request_id,
        token=wire.lockstep_token,
        peer=DecodePeer(wire.decode_engine_id, wire.decode_host, wire.decode_port, wire.decode_tp_size),
        block_ids=wire.local_block_ids,
        deadline=now + wire.lockstep_deadline_s,
        payload=payload,
    )
