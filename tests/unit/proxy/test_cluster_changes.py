"""Nodes that join and leave, keys side by side, groups over several nodes, suspects: what is chosen from."""

import pytest
from unit.proxy.nodes_for_tests import node

from lockstep.rpc.generated import lockstep_pb2 as pb
from proxy.cluster import Cluster
from proxy.nodes import Node, Role
from proxy.served import Served


def addresses(nodes: list[Node]) -> list[str]:
    return [n.address for n in nodes]


def cluster_of(*nodes: Node) -> Cluster:
    cluster = Cluster()
    for each in nodes:
        cluster.join(each.address, each.role)
        cluster.up(each)
    return cluster


def part(address: str, rank: int, role: Role = "decode", group: str = "g", size: int = 2) -> Node:
    """A node with one of the `size` ranks of a group."""
    ranks = [pb.RankDescription(global_rank=rank, engine_id=f"e{rank}", max_num_batched_tokens=100)]
    engine = pb.EngineSettings(data_parallel_size=size)
    return node(role, address, group_id=group, ranks=ranks, engine=engine)


def test_keys_that_clients_cannot_tell_apart_are_served_side_by_side() -> None:
    """An upgrade of the connector: both pairs take requests, each node with its own kind."""
    cluster = cluster_of(
        node("prefill", "p1"),
        node("decode", "d1"),
        node("prefill", "p2", connector_version="2"),
        node("decode", "d2", connector_version="2"),
    )
    assert addresses(cluster.live("prefill")) == ["p1", "p2"]
    new = cluster.live("prefill")[1]
    assert addresses(cluster.live("decode", key=new.key)) == ["d2"]
    cluster.down("p1", "gone")
    cluster.down("d1", "gone")
    assert cluster.not_ready_because() == ""
    assert cluster.successor() is None


def test_node_without_a_peer_of_its_key_is_not_chosen() -> None:
    """In the middle of an upgrade, a new prefill node has no decode node yet: it must get no request."""
    cluster = cluster_of(
        node("prefill", "p1"), node("decode", "d1"), node("prefill", "p2", connector_version="2")
    )
    assert addresses(cluster.live("prefill")) == ["p1"]


def test_node_of_a_shorter_context_is_not_of_the_front_end() -> None:
    """Requests were admitted by the longer limit. A longer one than that is no hindrance."""
    cluster = cluster_of(
        node("prefill", "p", served_context_limit=100),
        node("decode", "d1", served_context_limit=90),
        node("decode", "d2", served_context_limit=95),
        node("decode", "d3", served_context_limit=80),
    )
    assert cluster.served is not None
    assert cluster.served.context_limit_tokens == 90
    assert addresses(cluster.live("decode")) == ["d1", "d2"]


def test_another_model_succeeds_when_no_pair_of_the_served_one_is_left() -> None:
    """Not before; and what was served stays known, for the requests that were begun with it."""
    cluster = cluster_of(
        node("prefill", "p1"),
        node("decode", "d1"),
        node("prefill", "p2", model="n"),
        node("decode", "d2", model="n"),
    )
    old = cluster.served
    assert cluster.successor() is None
    cluster.down("p1", "gone")
    successor = cluster.successor()
    assert successor is not None
    assert addresses(list(successor)) == ["p2", "d2"]
    cluster.succeed(Served.by(*successor))
    assert cluster.not_ready_because() == ""
    assert addresses(cluster.live("decode")) == ["d2"]
    assert addresses(cluster.live("decode", old)) == ["d1"]


def test_node_that_is_no_longer_listed_takes_nothing_new() -> None:
    """It is there until it is forgotten, and listed anew it is used again."""
    cluster = cluster_of(node("prefill", "p"), node("decode", "d1"), node("decode", "d2"))
    cluster.leave("d1")
    assert addresses(cluster.live("decode")) == ["d2"]
    (reason,) = (entry.reason for entry in cluster.listed() if entry.address == "d1")
    assert reason == "no longer listed, it finishes what it has"
    cluster.join("d1", "decode")
    assert addresses(cluster.live("decode")) == ["d1", "d2"]
    cluster.leave("d1")
    cluster.forget("d1")
    assert [entry.address for entry in cluster.listed()] == ["p", "d2"]


def test_one_node_at_two_addresses_is_one() -> None:
    """As the flags and a name may give it; else its ranks would be counted twice."""
    cluster = cluster_of(
        node("prefill", "p"),
        node("decode", "d", instance_id="i"),
        node("decode", "10.0.0.1", instance_id="i"),
    )
    assert addresses(cluster.live("decode")) == ["d"]
    assert ("10.0.0.1", "the same node as d") in [(e.address, e.reason) for e in cluster.listed()]
    cluster.leave("d")
    assert addresses(cluster.live("decode")) == ["10.0.0.1"]


def test_group_over_two_nodes_is_used_when_all_its_ranks_are_there() -> None:
    """Until then the reason names the ranks; one node that goes takes the other with it."""
    cluster = cluster_of(node("prefill", "p"), part("d0", 0))
    cluster.join("d1", "decode")
    assert cluster.not_ready_because() == (
        "prefill p: connected; decode d0: rank 1 of its group not connected; decode d1: not connected yet"
    )
    cluster.up(part("d1", 1))
    assert addresses(cluster.live("decode")) == ["d0", "d1"]
    assert cluster.group("d0") == ["d0", "d1"]
    cluster.down("d1", "draining")
    assert cluster.pair() is None
    cluster.up(part("d1", 1))
    assert cluster.pair() is not None


def test_ranks_of_another_group_do_not_complete_it() -> None:
    """Two hosts of two groups are two halves."""
    cluster = cluster_of(node("prefill", "p"), part("d0", 0), part("d1", 1, group="other"))
    assert cluster.pair() is None


def test_suspect_takes_its_group_out_while_another_one_is_there() -> None:
    """The last group stays: it may only be slow, and there is nothing else to turn to."""
    cluster = cluster_of(node("prefill", "p"), part("d0", 0), part("d1", 1), node("decode", "d2"))
    cluster.suspect("d1", "no step for 5 s")
    assert addresses(cluster.live("decode")) == ["d2"]
    cluster.down("d2", "gone")
    assert addresses(cluster.live("decode")) == ["d0", "d1"]
    assert ("d1", "aside", "no step for 5 s") in [(e.address, e.state, e.reason) for e in cluster.listed()]
    cluster.up(node("decode", "d2"))
    cluster.suspect("d1", "")
    assert addresses(cluster.live("decode")) == ["d0", "d1", "d2"]


@pytest.mark.parametrize(
    ("left_out", "spare"), [(["d1"], True), (["d1", "d2"], False), (["p"], False), ([], True)]
)
def test_spare_pair(left_out: list[str], spare: bool) -> None:
    """Whether a stream has somewhere to go on without these nodes."""
    cluster = cluster_of(node("prefill", "p"), node("decode", "d1"), node("decode", "d2"))
    assert cluster.spare_pair(left_out) is spare


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "n"},
        {"revision": "r"},
        {"tokenizer": "t"},
        {"tokenizer_hash": "h"},
        {"generation_config": "vllm"},
        {"generation_config_hash": "h"},
        {"trust_remote_code": True},
        {"speculative_method": "mtp"},
    ],
)
def test_what_clients_can_tell_apart(changed: dict[str, object]) -> None:
    """Each of these needs a front end of its own."""
    served = Served.by(node("prefill", "p"), node("decode", "d"))
    assert served.includes(node("decode", "d", dtype="bfloat16", lockstep_version="2"))
    assert not served.includes(node("decode", "d", **changed))
