"""Both legs' `kv_transfer_params`: what is sent is what is accepted, and nothing else is."""

from typing import Any

import pytest

from kv_transfer.params import (
    PrefillPeer,
    carried_output_token_ids,
    check_request_id,
    decode_leg_params,
    new_token,
    parse_decode_leg,
    parse_prefill_leg,
    prefill_leg_params,
)

PEER = PrefillPeer(engine_id="e1_dp0", side_channel_host="10.0.0.1", side_channel_port=5601, tp_size=2)
REQUEST_ID = "ls-3f2a9c-17-0-a1"
TOKEN = "0123456789abcdef0123456789abcdef"


def test_prefill_leg_has_exactly_the_keys_the_connector_reads() -> None:
    """The prefill leg computes for a remote decode and carries the token, nothing more."""
    assert prefill_leg_params(TOKEN) == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "lockstep_token": TOKEN,
    }


def test_decode_leg_has_exactly_the_keys_the_connector_reads() -> None:
    """The decode leg names the prefill rank and the request's id there."""
    assert decode_leg_params(PEER, REQUEST_ID, TOKEN) == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": "e1_dp0",
        "remote_host": "10.0.0.1",
        "remote_port": 5601,
        "tp_size": 2,
        "remote_request_id": REQUEST_ID,
        "lockstep_token": TOKEN,
    }


def test_prefill_leg_round_trip() -> None:
    """A node reads back the token that the proxy sent."""
    assert parse_prefill_leg(prefill_leg_params(TOKEN)).token == TOKEN


def test_decode_leg_round_trip() -> None:
    """A node reads back the peer, the id and the token that the proxy sent."""
    leg = parse_decode_leg(decode_leg_params(PEER, REQUEST_ID, TOKEN), REQUEST_ID)
    assert (leg.peer, leg.request_id, leg.token) == (PEER, REQUEST_ID, TOKEN)


def test_each_token_is_new() -> None:
    """Two attempts never share a token, and each passes the check of both legs."""
    first, second = new_token(), new_token()
    assert first != second
    assert parse_prefill_leg(prefill_leg_params(first)).token == first


@pytest.mark.parametrize("request_id", ["", "ls-17-0123abcd", "ls-17-0123ABCD", "x-deadbeef"])
def test_ids_that_vllm_would_strip_are_refused(request_id: str) -> None:
    """vLLM matches ids without a trailing '-<8 hex>', so such an id could match another request's."""
    with pytest.raises(ValueError, match="request_id"):
        check_request_id(request_id)


@pytest.mark.parametrize("request_id", [REQUEST_ID, "ls-17-0123abc", "ls-17-0123abcde", "deadbeef"])
def test_ids_that_vllm_leaves_alone_are_accepted(request_id: str) -> None:
    """Only a dash and exactly eight hex digits at the end are a suffix."""
    assert check_request_id(request_id) == request_id


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"do_remote_decode": True}, "do_remote_decode"),
        ({"do_remote_prefill": False}, "do_remote_prefill"),
        ({"do_remote_prefill": 1}, "do_remote_prefill"),
        ({"remote_engine_id": ""}, "remote_engine_id"),
        ({"remote_host": None}, "remote_host"),
        ({"remote_port": 0}, "remote_port"),
        ({"remote_port": "5601"}, "remote_port"),
        ({"remote_port": 65536}, "remote_port"),
        ({"tp_size": 0}, "tp_size"),
        ({"tp_size": True}, "tp_size"),
        ({"remote_request_id": "other"}, "remote_request_id"),
        ({"lockstep_token": "short"}, "lockstep_token"),
        ({"lockstep_token": TOKEN.upper()}, "lockstep_token"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_bad_decode_leg_is_refused_by_field(change: dict[str, Any], field: str) -> None:
    """The error names the first field that is wrong."""
    with pytest.raises(ValueError, match=field):
        parse_decode_leg(decode_leg_params(PEER, REQUEST_ID, TOKEN) | change, REQUEST_ID)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (None, "kv_transfer_params"),
        ({}, "do_remote_decode"),
        (decode_leg_params(PEER, REQUEST_ID, TOKEN), "remote_engine_id"),
        ({"do_remote_decode": True, "do_remote_prefill": False}, "lockstep_token"),
    ],
)
def test_a_bad_prefill_leg_is_refused_by_field(params: dict[str, Any] | None, field: str) -> None:
    """A prefill node refuses a decode leg, a missing token and missing parameters."""
    with pytest.raises(ValueError, match=field):
        parse_prefill_leg(params)


@pytest.mark.parametrize("field", sorted(decode_leg_params(PEER, REQUEST_ID, TOKEN)))
def test_every_decode_field_is_required(field: str) -> None:
    """Leaving any field out is refused, and the error names it."""
    params = decode_leg_params(PEER, REQUEST_ID, TOKEN)
    del params[field]
    with pytest.raises(ValueError, match=field):
        parse_decode_leg(params, REQUEST_ID)


def test_a_later_attempt_carries_the_tokens_generated_so_far() -> None:
    """Both legs get the tokens, in order, and a node reads them back."""
    carried = (7, 0, 151)
    prefill = prefill_leg_params(TOKEN, carried)
    decode = decode_leg_params(PEER, REQUEST_ID, TOKEN, carried)
    assert prefill["lockstep_output_token_ids"] == decode["lockstep_output_token_ids"] == [7, 0, 151]
    assert parse_prefill_leg(prefill).output_token_ids == carried
    assert parse_decode_leg(decode, REQUEST_ID).output_token_ids == carried


def test_a_first_attempt_carries_none() -> None:
    """Without the field there are no carried tokens, whatever else the parameters say."""
    assert parse_prefill_leg(prefill_leg_params(TOKEN)).output_token_ids == ()
    assert carried_output_token_ids(None) == carried_output_token_ids({}) == []


def test_the_engine_gets_a_list_of_its_own() -> None:
    """vLLM's runner appends to the list, which must not reach the parameters of the request."""
    params = prefill_leg_params(TOKEN, [1, 2])
    carried_output_token_ids(params).append(3)
    assert carried_output_token_ids(params) == [1, 2]


@pytest.mark.parametrize("value", [5, "12", [1, -1], [1, "2"], [True], [1.0], [None], {"0": 1}])
def test_carried_tokens_that_are_no_token_ids_are_refused(value: Any) -> None:
    """The error names the field, on both legs."""
    params = {"lockstep_output_token_ids": value}
    with pytest.raises(ValueError, match="lockstep_output_token_ids"):
        parse_prefill_leg(prefill_leg_params(TOKEN) | params)
    with pytest.raises(ValueError, match="lockstep_output_token_ids"):
        parse_decode_leg(decode_leg_params(PEER, REQUEST_ID, TOKEN) | params, REQUEST_ID)


def test_hand_off_is_told_to_both_legs() -> None:
    """Absent unless promised, so that legs without it are as they were."""
    peer = PrefillPeer("p0", "127.0.0.1", 5600, 1)
    assert parse_prefill_leg(prefill_leg_params("a" * 32, hand_off=True)).hand_off
    assert parse_decode_leg(decode_leg_params(peer, "ls-0", "a" * 32, hand_off=True), "ls-0").hand_off
    assert not parse_prefill_leg(prefill_leg_params("a" * 32)).hand_off
    assert "lockstep_hand_off" not in decode_leg_params(peer, "ls-0", "a" * 32)


def test_hand_off_is_a_boolean() -> None:
    """Nothing that is merely true."""
    with pytest.raises(ValueError, match="lockstep_hand_off must be true or false"):
        parse_prefill_leg(prefill_leg_params("a" * 32) | {"lockstep_hand_off": 1})
