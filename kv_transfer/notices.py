"""What prefill and decode workers say to each other over NIXL notifications, besides the KV itself.

Decode registers its blocks (vLLM's PUSH_REG with our keys in it) or cancels. Prefill says `Completed` once
every write is done; where there will be no (more) write it says `Released` instead, after which decode may
reuse the blocks, and `Failing` before that while writes are still in flight. Every answer repeats the token
of the message that it answers, so a forged registration cannot make prefill release a request of somebody
else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from kv_transfer.config import CONNECTOR_VERSION

NOTICE_FAMILY = b"LOCKSTEP/"
NOTICE_PREFIX = NOTICE_FAMILY + CONNECTOR_VERSION.encode() + b":"
MAX_PAYLOAD_BYTES = 4096


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


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Decode to prefill, when it stands still for want of blocks: how is it with this request?

    With blocks `registered`, prefill answers `Released` if it has computed nothing yet; without, `Held` if it
    has computed everything. No answer to anything else.
    """

    request_id: str
    token: str
    registered: bool
    peer: DecodePeer


class Held(msgspec.Struct, frozen=True, tag=True):
    """Prefill to decode: the prompt is computed and its blocks wait for a registration."""

    request_id: str
    token: str


class Completed(msgspec.Struct, frozen=True, tag=True):
    """Prefill to decode: every write of this worker is done, the KV is whole.

    `writers` is the prefill TP size, so that decode can count the notices: one from each worker that writes
    to it. `payload` is what prefill hands over besides the KV, the same from every worker.
    """

    request_id: str
    token: str
    writers: int
    payload: Annotated[bytes, msgspec.Meta(max_length=MAX_PAYLOAD_BYTES)] = b""


class Failing(msgspec.Struct, frozen=True, tag=True):
    """Prefill to decode: the KV will not become whole. The blocks may still be written until `Released`."""

    request_id: str
    token: str
    reason: str


class Released(msgspec.Struct, frozen=True, tag=True):
    """Prefill to decode: no write of this request is in flight and none will follow. `writers` as above."""

    request_id: str
    token: str
    reason: str
    writers: int


Notice = Cancel | Ask | Held | Completed | Failing | Released


@dataclass(frozen=True, slots=True)
class Registration:
    """A decode rank's blocks for one request, as prefill received them.

    `payload` is vLLM's registration, as `_do_start_push_kv` takes it; `block_ids` holds one list per KV cache
    group, without the blocks that decode has in its own prefix cache. `start_blocks` counts those, so it is
    the place of the first one in the list; `block_sizes` are decode's, in tokens; both have one entry per
    group. `deadline` is on prefill's own monotonic clock, in seconds.
    """

    request_id: str
    token: str
    peer: DecodePeer
    block_ids: tuple[tuple[int, ...], ...]
    start_blocks: tuple[int, ...]
    block_sizes: tuple[int, ...]
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
    lockstep_start_blocks: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    lockstep_block_sizes: tuple[Annotated[int, msgspec.Meta(ge=1)], ...]


def encode_notice(notice: Notice) -> bytes:
    return NOTICE_PREFIX + _encoder.encode(notice)


def decode_notice(data: bytes) -> Notice:
    """Raises NoticeError, also for a notice of another version."""
    if not data.startswith(NOTICE_PREFIX):
        raise NoticeError("not a notice of version " + CONNECTOR_VERSION)
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
    groups = {len(wire.local_block_ids), len(wire.lockstep_start_blocks), len(wire.lockstep_block_sizes)}
    if len(groups) != 1:
        raise NoticeError("a registration must name as many start blocks and sizes as groups of blocks")
    return Registration(
        request_id=wire.request_id,
        token=wire.lockstep_token,
        peer=DecodePeer(wire.decode_engine_id, wire.decode_host, wire.decode_port, wire.decode_tp_size),
        block_ids=wire.local_block_ids,
        start_blocks=wire.lockstep_start_blocks,
        block_sizes=wire.lockstep_block_sizes,
        deadline=now + wire.lockstep_deadline_s,
        payload=payload,
    )
