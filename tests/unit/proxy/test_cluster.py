"""Pairing by the compatibility key, refusals, and the reason for not being ready."""

from dataclasses import fields, replace

import pytest
from unit.proxy.nodes_for_tests import node

from lockstep.rpc.generated import lockstep_pb2 as pb
from proxy.cluster import Cluster
from proxy.nodes import CompatibilityKey, from_description

DESCRIBED: dict[str, object] = {"protocol_version": 1, "role": 1, "ranks": [pb.RankDescription()]}


def test_pair_of_equal_nodes() -> None:
    """Ready, and no reason is left."""
    cluster = Cluster(["p"], ["d"])
    cluster.up(node("prefill", "p"))
    assert cluster.not_ready_because() == "prefill p: connected; decode d: not connected yet"
    cluster.up(node("decode", "d"))
    assert cluster.pair()
    assert cluster.not_ready_because() == ""


@pytest.mark.parametrize("field", [field.name for field in fields(CompatibilityKey)])
def test_each_field_of_the_key_keeps_nodes_apart(field: str) -> None:
    """The reason names the field and both values."""
    prefill, decode = node("prefill", "p"), node("decode", "d")
    other = 99 if isinstance(getattr(decode.key, field), int) else "other"
    decode = replace(decode, key=replace(decode.key, **{field: other}))
    cluster = Cluster(["p"], ["d"])
    cluster.up(prefill)
    cluster.up(decode)
    mine = getattr(prefill.key, field)
    assert cluster.pair() is None
    assert f"prefill p: {field} is {mine!r}, but {other!r} on decode node d" in cluster.not_ready_because()


def test_node_with_another_peer_is_not_refused() -> None:
    """Two keys live side by side; the first pair's is served, the other's nodes are left alone."""
    cluster = Cluster(["p1", "p2"], ["d1", "d2"])
    cluster.up(node("prefill", "p1"))
    cluster.up(node("decode", "d1"))
    cluster.up(node("prefill", "p2", model="n"))
    cluster.up(node("decode", "d2", model="n"))
    assert [n.address for n in cluster.live("prefill")] == ["p1"]
    cluster.down("p1", "gone")
    reason = cluster.not_ready_because()
    assert "prefill p1: gone" in reason
    assert "prefill p2: connected, but another model or version is served here" in reason


def test_refusal_ends_when_a_peer_comes() -> None:
    """A rolling upgrade passes through such states."""
    cluster = Cluster(["p"], ["d1", "d2"])
    cluster.up(node("prefill", "p", model="n"))
    cluster.up(node("decode", "d1"))
    assert cluster.pair() is None
    cluster.up(node("decode", "d2", model="n"))
    assert cluster.pair() is not None


def test_known_ranks_stay_while_a_node_is_away() -> None:
    """So that the numbers of the other ranks do not move."""
    cluster = Cluster(["p"], ["d1", "d2"])
    cluster.up(node("prefill", "p"))
    cluster.up(node("decode", "d1"))
    cluster.up(node("decode", "d2"))
    cluster.down("d1", "gone")
    assert [n.address for n in cluster.live("decode")] == ["d2"]
    assert [n.address for n in cluster.known("decode")] == ["d1", "d2"]


def test_states_for_people() -> None:
    """A node that answered but cannot be used is refused, not away; what it described stays."""
    cluster = Cluster(["p"], ["d1", "d2", "d3"])
    cluster.up(node("prefill", "p"))
    cluster.up(node("decode", "d1"))
    cluster.up(node("decode", "d2", model="n"))
    cluster.down("d3", "refused: it is a prefill node, but listed under --decode")
    cluster.down("d1", "draining")
    states = [(entry.address, entry.state, entry.reason) for entry in cluster.listed()]
    assert states == [
        ("p", "refused", "model is 'm', but 'n' on decode node d2"),
        ("d1", "away", "draining"),
        ("d2", "refused", "model is 'n', but 'm' on prefill node p"),
        ("d3", "refused", "it is a prefill node, but listed under --decode"),
    ]
    assert [entry.node is not None for entry in cluster.listed()] == [True, True, True, False]


def test_address_in_both_lists_is_refused() -> None:
    """A node has one role."""
    with pytest.raises(ValueError, match="h:1 is listed as both"):
        Cluster(["h:1"], ["h:1"])


@pytest.mark.parametrize(
    ("changed", "why"),
    [({"protocol_version": 7}, "protocol version 7"), ({"role": 0}, "role"), ({"ranks": []}, "no ranks")],
)
def test_description_that_cannot_be_used(changed: dict[str, object], why: str) -> None:
    """Said in words that go into the log and the reason."""
    with pytest.raises(ValueError, match=why):
        from_description("p", pb.NodeDescription(**{**DESCRIBED, **changed}))


def test_key_has_no_default() -> None:
    """A field added to the key must be one that nodes describe."""
    described = {field.name for field in pb.NodeDescription.DESCRIPTOR.fields}
    assert {field.name for field in fields(CompatibilityKey)} <= described
