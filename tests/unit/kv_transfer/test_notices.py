"""The notices between prefill and decode workers on the wire."""

from typing import Any

import msgspec
import pytest

from kv_transfer.notices import (
    NOTICE_PREFIX,
    Cancel,
    Completed,
    DecodePeer,
    Failing,
    NoticeError,
    Released,
    decode_notice,
    decode_registration,
    encode_notice,
)

PEER = DecodePeer("d0_dp1", "10.0.0.2", 5701, 2)
PAYLOAD: dict[str, Any] = {
    "request_id": "ls-1-0-a1",
    "lockstep_token": "a" * 32,
    "lockstep_deadline_s": 12.5,
    "decode_engine_id": "d0_dp1",
    "decode_host": "10.0.0.2",
    "decode_port": 5701,
    "decode_tp_size": 2,
    "local_block_ids": [[4, 5], [6]],
    "lockstep_start_blocks": [2, 0],
    "lockstep_block_sizes": [16, 32],
    "remote_engine_id": "p0",
}


@pytest.mark.parametrize(
    "notice",
    [
        Cancel(request_id="r", token="t", reason="aborted", registered=True, peer=PEER),
        Completed("r", "t", 2, b"payload"),
        Failing("r", "t", "push_failed"),
        Released("r", "t", "push_failed", 2),
    ],
)
def test_notices_round_trip(notice: Any) -> None:
    """Every kind comes back as it was, and is told from the others."""
    data = encode_notice(notice)
    assert data.startswith(NOTICE_PREFIX)
    assert decode_notice(data) == notice


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode({"type": "Other"}), b"\x80"])
def test_malformed_notices_are_refused(body: bytes) -> None:
    """Anything else is an error that the worker counts, never a crash of its thread."""
    with pytest.raises(NoticeError):
        decode_notice(NOTICE_PREFIX + body)


def test_registration_is_read() -> None:
    """vLLM's payload with our two keys; the deadline is put on the receiver's clock."""
    registration = decode_registration(msgspec.msgpack.encode(PAYLOAD), now=100.0)
    assert registration.request_id == "ls-1-0-a1"
    assert registration.token == "a" * 32
    assert registration.peer == PEER
    assert registration.block_ids == ((4, 5), (6,))
    assert registration.start_blocks == (2, 0)
    assert registration.block_sizes == (16, 32)
    assert registration.deadline == 112.5
    assert registration.payload == PAYLOAD


@pytest.mark.parametrize(
    "field",
    [
        "request_id",
        "lockstep_token",
        "lockstep_deadline_s",
        "lockstep_start_blocks",
        "lockstep_block_sizes",
        "local_block_ids",
    ],
)
def test_registration_without_a_field_is_refused(field: str) -> None:
    """A stock vLLM decode node, which sends no token, cannot register here."""
    payload = {name: value for name, value in PAYLOAD.items() if name != field}
    with pytest.raises(NoticeError, match=field):
        decode_registration(msgspec.msgpack.encode(payload), now=0.0)


@pytest.mark.parametrize(
    "change",
    [
        {"lockstep_start_blocks": [0]},
        {"lockstep_start_blocks": [-1, 0]},
        {"lockstep_block_sizes": [16, 0]},
        {"local_block_ids": [[4]]},
    ],
)
def test_registration_with_unmatched_or_impossible_groups_is_refused(change: dict[str, Any]) -> None:
    """Blocks are paired by these numbers, so a registration that cannot be right never reaches the ledger."""
    with pytest.raises(NoticeError):
        decode_registration(msgspec.msgpack.encode(PAYLOAD | change), now=0.0)


def test_notice_of_another_version_is_refused() -> None:
    """An older or newer node's notice is dropped and counted, not misread."""
    body = encode_notice(Failing("r", "t", "push_failed"))[len(NOTICE_PREFIX) :]
    with pytest.raises(NoticeError, match="version"):
        decode_notice(b"LOCKSTEP/1:" + body)


def test_payload_is_bounded() -> None:
    """A peer cannot make a decode worker keep more than 4 KiB for a request."""
    assert decode_notice(encode_notice(Completed("r", "t", 1, b"x" * 4096)))
    with pytest.raises(NoticeError):
        decode_notice(encode_notice(Completed("r", "t", 1, b"x" * 4097)))
