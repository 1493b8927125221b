"""The bytes of a hand-off: the first token and the draft tokens that follow it, with a version in front."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

VERSION = 1
MAX_DRAFTS = 64
"""More than any served K; bounds what a notice can carry."""

_HEADER = struct.Struct("<BBI")  # version, number of drafts, first token


class HandOffError(ValueError):
    """A hand-off that cannot be continued from; the message says why."""


@dataclass(frozen=True, slots=True)
class HandOff:
    """What prefill sampled, and what its drafter proposed to follow it."""

    token_id: int
    draft_token_ids: tuple[int, ...]


def encode(token_id: int, draft_token_ids: Sequence[int]) -> bytes:
    """Raises HandOffError for ids that are none (vLLM pads with -1) and for too many drafts."""
    if len(draft_token_ids) > MAX_DRAFTS or any(not 0 <= i < 2**32 for i in (token_id, *draft_token_ids)):
        raise HandOffError(f"cannot hand over token {token_id} and drafts {list(draft_token_ids)}")
    header = _HEADER.pack(VERSION, len(draft_token_ids), token_id)
    return header + struct.pack(f"<{len(draft_token_ids)}I", *draft_token_ids)


def decode(payload: bytes, *, num_drafts: int, vocab_size: int) -> HandOff:
    """Read what `encode` wrote, for an engine with `num_drafts` speculative tokens.

    Raises HandOffError for another version, another length, more drafts than the engine takes, and ids out of
    the vocabulary.
    """
    if not payload:
        raise HandOffError("nothing was handed over")
    if payload[0] != VERSION:
        raise HandOffError(f"version {payload[0]}, not {VERSION}")
    if len(payload) < _HEADER.size:
        raise HandOffError(f"only {len(payload)} bytes")
    _, count, token_id = _HEADER.unpack_from(payload)
    if len(payload) != _HEADER.size + 4 * count:
        raise HandOffError(f"{len(payload)} bytes for {count} drafts")
    if count > num_drafts:
        raise HandOffError(f"{count} drafts, more than {num_drafts}")
    drafts = struct.unpack_from(f"<{count}I", payload, _HEADER.size)
    if max(token_id, *drafts, 0) >= vocab_size:
        raise HandOffError(f"a token id is not below the vocabulary's size {vocab_size}")
    return HandOff(token_id, drafts)
