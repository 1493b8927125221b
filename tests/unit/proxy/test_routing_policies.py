"""What each routing policy chooses, over the real books of the ranks."""

from collections import Counter

import pytest
from unit.proxy.nodes_for_tests import node
from unit.proxy.test_block_hashes import frame

from lockstep.errors import ConfigError
from lockstep.rpc.generated import lockstep_pb2 as pb
from proxy.config import PolicyName, ProxyConfig
from proxy.nodes import Node, Role
from proxy.routing import Asked, RankLoad, Ranks
from proxy.routing.policies import policy
from proxy.routing.prefix_hashes import PrefixHashes

HASHES = {"hash_algorithm": "sha256", "hash_seed": "s"}
PROMPT = list(range(160))
K = 2
GRAPHS = [(1 + K) * rows for rows in (1, 2, 4, 8)]


def prefill_ranks(name: PolicyName, *addresses: str) -> tuple[Ranks, list[Node]]:
    nodes = [node("prefill", address, **HASHES) for address in addresses]
    ranks = Ranks(10_000, policy(name))
    for n in nodes:
        ranks.add(n)
    return ranks, nodes


def decode_node(address: str, num_ranks: int = 1, group_id: str = "", num_kv_blocks: int = 1000) -> Node:
    rows = [
        pb.RankDescription(
            global_rank=rank,
            local_rank=rank,
            max_num_seqs=8,
            max_num_batched_tokens=8 * (1 + K),
            num_kv_blocks=num_kv_blocks,
        )
        for rank in range(num_ranks)
    ]
    graphs = pb.EngineSettings(full_graph_tokens=GRAPHS)
    group = {"group_id": group_id} if group_id else {}
    return node("decode", address, ranks=rows, engine=graphs, num_speculative_tokens=K, **group)


def decode_ranks(*nodes: Node) -> Ranks:
    ranks = Ranks(None, policy("lockstep"))
    for n in nodes:
        ranks.add(n)
    return ranks


def store(ranks: Ranks, address: str, num_blocks: int, tokens: list[int] = PROMPT) -> None:
    """The rank's prefix cache has the first blocks of a prompt."""
    chain = PrefixHashes([*tokens, 0])._chain(node("prefill", address, **HASHES).key)
    assert ranks.kv_blocks(address, frame(1, [chain.key(i) for i in range(num_blocks)], snapshot=True))


def asked(**changes: object) -> Asked:
    return Asked(len(PROMPT), **{"prefix": PrefixHashes(PROMPT), **changes})


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_round_robin_goes_around_whatever_the_load(role: Role) -> None:
    """A rank that comes or goes does not make another one be passed over."""
    nodes = [node(role, address) for address in "abc"]
    ranks = Ranks(10_000, policy("round_robin"))
    for n in nodes:
        ranks.add(n)
    pick = ranks.pick_prefill if role == "prefill" else ranks.pick_decode

    def picked(among: list[Node]) -> str:
        load = pick(among, asked())
        load.begin(9)
        return load.node.address

    assert [picked(nodes) for _ in range(4)] == ["a", "b", "c", "a"]
    assert [picked([nodes[0], nodes[2]]) for _ in range(2)] == ["c", "a"]
    assert [picked(nodes) for _ in range(2)] == ["b", "c"]


def test_prefix_takes_the_longest_one_and_of_equals_the_least_loaded() -> None:
    ranks, nodes = prefill_ranks("prefix", "a", "b", "c")
    store(ranks, "a", 2)
    store(ranks, "b", 5)
    ranks.of("b")[0].begin(5000)
    assert ranks.pick_prefill(nodes, asked()).node.address == "b"
    store(ranks, "c", 5)
    assert ranks.pick_prefill(nodes, asked()).node.address == "c"


@pytest.mark.parametrize("name", ["prefix", "lockstep"])
def test_without_events_prefill_is_chosen_by_load(name: PolicyName) -> None:
    """Nodes with --kv-events off, prompts that nobody has, and requests that do not read the cache."""
    ranks, nodes = prefill_ranks(name, "a", "b")
    ranks.of("a")[0].begin(10)
    assert ranks.pick_prefill(nodes, asked()).node.address == "b"
    store(ranks, "a", 5, tokens=list(range(500, 700)))
    assert ranks.pick_prefill(nodes, asked()).node.address == "b"
    store(ranks, "a", 5)
    assert ranks.pick_prefill(nodes, asked(prefix=None)).node.address == "b"


def test_lockstep_weighs_what_is_cached_against_what_waits() -> None:
    """80 of 160 tokens are cached: each is worth as much as three that wait."""
    ranks, nodes = prefill_ranks("lockstep", "a", "b")
    store(ranks, "a", 5)
    ranks.of("a")[0].begin(239)
    assert ranks.pick_prefill(nodes, asked()).node.address == "a"
    ranks.of("a")[0].begin(2)
    assert ranks.pick_prefill(nodes, asked()).node.address == "b"


def test_longest_prefix_does_not_lift_the_window() -> None:
    ranks, nodes = prefill_ranks("prefix", "a", "b")
    store(ranks, "a", 5)
    ranks.of("a")[0].begin(10_000)
    assert ranks.pick_prefill(nodes, asked()).node.address == "b"


def test_policy_that_does_not_read_prefixes_keeps_none() -> None:
    """What nodes tell anyway costs no memory."""
    ranks, _ = prefill_ranks("least_loaded", "a")
    store(ranks, "a", 5)
    assert ranks.of("a")[0].cached is None
    assert not ranks.reads_prefixes


def loads(ranks: Ranks, n: Node) -> list[RankLoad]:
    return list(ranks.of(n.address).values())


def test_decode_stays_in_the_graph_that_the_group_runs_in() -> None:
    """Group a has 3 rows in a graph of 4, b has 2 in one of 2: a has more, and takes one more for free."""
    a, b = decode_node("a"), decode_node("b")
    ranks = decode_ranks(a, b)
    ranks.report("a", 0, 3, 0)
    ranks.report("b", 0, 2, 0)
    assert ranks.pick_decode([a, b], asked()).node is a
    ranks.report("a", 0, 4, 0)
    assert ranks.pick_decode([a, b], asked()).node is b


def test_graph_of_a_group_is_that_of_its_fullest_rank() -> None:
    """Over all its nodes: 5 rows on one host have the other host run a graph of 8 as well."""
    here, there = decode_node("a1", group_id="a"), decode_node("a2", group_id="a")
    other = decode_node("b")
    ranks = decode_ranks(here, there, other)
    ranks.report("a1", 0, 5, 0)
    ranks.report("a2", 0, 2, 0)
    ranks.report("b", 0, 1, 0)
    assert ranks.pick_decode([here, there, other], asked()).node is there


def test_rank_with_a_free_row_and_free_blocks_comes_first() -> None:
    """Even if its group's graph grows: a request without either waits on the rank."""
    full, free = decode_node("a"), decode_node("b")
    ranks = decode_ranks(full, free)
    ranks.report("a", 0, 8, 0)
    ranks.report("b", 0, 4, 0)
    assert ranks.pick_decode([full, free], asked()).node is free
    ranks.report("a", 0, 2, 0, kv_cache_usage=0.999)
    assert ranks.pick_decode([full, free], asked()).node is free
    ranks.report("a", 0, 3, 0, kv_cache_usage=0.5)
    assert ranks.pick_decode([full, free], asked()).node is full


def test_blocks_of_what_was_sent_since_the_report_are_not_free() -> None:
    """320 tokens have room on each rank; the one with fewer rows gets a prompt of 300."""
    n = decode_node("a", num_ranks=2, num_kv_blocks=20)
    ranks = decode_ranks(n)
    ranks.report("a", 0, 4, 0)
    first = ranks.pick_decode([n], asked())
    assert first.rank.local_rank == 1
    first.begin(300)
    assert ranks.pick_decode([n], asked()).rank.local_rank == 0
    first.report(1, 0, 0.5)
    assert ranks.pick_decode([n], asked()) is first


def test_rank_takes_the_rows_of_two_steps_and_no_more() -> None:
    """What is beyond waits in the proxy; a client that asked for this very rank is let through."""
    n = decode_node("a")
    ranks = decode_ranks(n)
    ranks.report("a", 0, 8, 7)
    load = ranks.pick_decode([n], asked())
    assert load is not None
    load.begin(160)
    assert ranks.pick_decode([n], asked()) is None
    assert ranks.decode_at([n], [n], 0) is load


def test_session_keeps_its_ranks_while_others_come_and_go() -> None:
    """Each of 200 sessions; one that goes moves its own only, and they are spread over all."""
    nodes = [node("prefill", address) for address in "abcd"]
    ranks = Ranks(10_000)
    for n in nodes:
        ranks.add(n)

    def places(among: list[Node]) -> dict[int, str]:
        return {i: ranks.pick_prefill(among, asked(session=f"s{i}")).node.address for i in range(200)}

    before, without = places(nodes), places(nodes[:3])
    assert min(Counter(before.values()).values()) > 25
    assert places(nodes) == before
    assert {i for i in before if before[i] != without[i]} == {i for i in before if before[i] == "d"}


def test_session_leaves_a_rank_that_failed_or_takes_no_more() -> None:
    n = decode_node("a", num_ranks=2)
    ranks = decode_ranks(n)
    own = ranks.pick_decode([n], asked(session="s"))
    other = next(load for load in loads(ranks, n) if load is not own)
    own.report(8, 0)
    assert ranks.pick_decode([n], asked(session="s")) is own
    assert ranks.pick_decode([n], asked(session="s", failed_at={own.key: 1})) is other
    own.report(8, 8)
    assert ranks.pick_decode([n], asked(session="s")) is other


def test_wrong_policy_is_refused_with_those_that_there_are() -> None:
    text = r"--routing-policy: Input should be 'lockstep', 'prefix', 'least_loaded' or 'round_robin'"
    with pytest.raises(ConfigError, match=text):
        ProxyConfig.load(
            ["--prefill", "a:1", "--decode", "b:1", "--routing-policy", "random"], "lockstep proxy", ""
        )
