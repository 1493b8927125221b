"""The one owner of both legs' `kv_transfer_params`: what the proxy sends and what a node accepts.

Both legs of an attempt carry the same request id and the same random token. Decode sends the token with its
registration; prefill pushes only if it equals the token of its own leg. vLLM's keys are read in
`nixl/push_scheduler.py` and `nixl/metadata.py::add_new_req_to_recv`; ours is `lockstep_token`.
"""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TOKEN_KEY = "lockstep_token"
_TOKEN = re.compile(r"[0-9a-f]{32}")
# vLLM takes such an ending for its own random suffix and strips it (nixl/utils.py::get_base_request_id).
_VLLM_SUFFIX = re.compile(r"-[0-9a-f]{8}$", re.IGNORECASE)

_PREFILL_KEYS = frozenset({"do_remote_decode", "do_remote_prefill", TOKEN_KEY})
_DECODE_KEYS = _PREFILL_KEYS | {
    "remote_engine_id",
    "remote_host",
    "remote_port",
    "remote_request_id",
    "tp_size",
}


@dataclass(frozen=True, slots=True)
class PrefillPeer:
    """Where one prefill rank takes registrations.

    `engine_id` is the rank's own (vLLM appends `_dp{rank}` when DP > 1); `side_channel_port` already includes
    the DP index (nixl/base_scheduler.py:76).
    """

    engine_id: str
    side_channel_host: str
    side_channel_port: int
    tp_size: int


@dataclass(frozen=True, slots=True)
class PrefillLeg:
    """What a prefill node was told about one request."""

    token: str


@dataclass(frozen=True, slots=True)
class DecodeLeg:
    """What a decode node was told about one request."""

    peer: PrefillPeer
    request_id: str
    token: str


def new_token() -> str:
    """A token for one attempt: 32 hex digits from the system's random source."""
    return secrets.token_hex(16)


def check_request_id(request_id: str) -> str:
    """Return `request_id`, or raise ValueError if vLLM could not match it exactly."""
    if not request_id:
        raise ValueError("request_id is empty")
    if _VLLM_SUFFIX.search(request_id):
        raise ValueError(f"request_id {request_id!r} ends in '-' and 8 hex digits, which vLLM strips")
    return request_id


def prefill_leg_params(token: str) -> dict[str, Any]:
    """`kv_transfer_params` of the request that computes the prompt and pushes its KV."""
    return {"do_remote_decode": True, "do_remote_prefill": False, TOKEN_KEY: token}


def decode_leg_params(peer: PrefillPeer, request_id: str, token: str) -> dict[str, Any]:
    """`kv_transfer_params` of the request that waits for the KV and generates.

    Raises ValueError for a request id that cannot be matched exactly.
    """
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": peer.engine_id,
        "remote_host": peer.side_channel_host,
        "remote_port": peer.side_channel_port,
        "tp_size": peer.tp_size,
        "remote_request_id": check_request_id(request_id),
        TOKEN_KEY: token,
    }


def parse_prefill_leg(params: Mapping[str, Any] | None) -> PrefillLeg:
    """Check what a prefill node received. Raises ValueError that names the field."""
    fields = _leg(params, _PREFILL_KEYS, do_remote_decode=True)
    return PrefillLeg(token=_token(fields))


def parse_decode_leg(params: Mapping[str, Any] | None, request_id: str) -> DecodeLeg:
    """Check what a decode node received for `request_id`. Raises ValueError that names the field."""
    fields = _leg(params, _DECODE_KEYS, do_remote_decode=False)
    remote_request_id = check_request_id(_string(fields, "remote_request_id"))
    if remote_request_id != request_id:
        raise ValueError("kv_transfer_params.remote_request_id differs from the request's own id")
    peer = PrefillPeer(
        engine_id=_string(fields, "remote_engine_id"),
        side_channel_host=_string(fields, "remote_host"),
        side_channel_port=_integer(fields, "remote_port", 1, 65535),
        tp_size=_integer(fields, "tp_size", 1, 1024),
    )
    return DecodeLeg(peer=peer, request_id=remote_request_id, token=_token(fields))


def _leg(
    params: Mapping[str, Any] | None, keys: frozenset[str], *, do_remote_decode: bool
) -> Mapping[str, Any]:
    if params is None:
        raise ValueError("kv_transfer_params is missing")
    if unknown := sorted(params.keys() - keys):
        raise ValueError(f"kv_transfer_params.{unknown[0]} is not known")
    wanted = {"do_remote_decode": do_remote_decode, "do_remote_prefill": not do_remote_decode}
    for name, value in wanted.items():
        if params.get(name) is not value:
            raise ValueError(f"kv_transfer_params.{name} must be {str(value).lower()} on this leg")
    return params


def _token(params: Mapping[str, Any]) -> str:
    token = _string(params, TOKEN_KEY)
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"kv_transfer_params.{TOKEN_KEY} must be 32 lowercase hex digits")
    return token


def _string(params: Mapping[str, Any], name: str) -> str:
    value = params.get(name)
    if not isinstance(value, str) or not value:
        raise ValueError(f"kv_transfer_params.{name} must be a non-empty string")
    return value


def _integer(params: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = params.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"kv_transfer_params.{name} must be an integer from {low} to {high}")
    return value
