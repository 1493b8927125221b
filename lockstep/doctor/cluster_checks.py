"""What is checked between nodes: whether they fit, find each other, and wait long enough for each other."""

import ipaddress
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from lockstep.doctor.described import DECODE, PREFILL, Described
from lockstep.doctor.findings import Finding, Verdict, error, ok, warning

FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "model": "MODEL",
        "revision": "--revision",
        "tokenizer_hash": "--tokenizer",
        "generation_config_hash": "--generation-config",
        "dtype": "--dtype",
        "kv_cache_dtype": "--kv-cache-dtype",
        "block_size": "--block-size",
        "num_speculative_tokens": "--speculative-config",
        "speculative_method": "--speculative-config",
        "speculative_config": "--speculative-config",
        "hash_seed": "PYTHONHASHSEED",
        "hash_algorithm": "--prefix-caching-hash-algo",
        "vllm_version": "vllm",
        "nixl_version": "nixl",
        "connector_version": "lockstep",
        "lockstep_version": "lockstep",
    }
)
"""Fields of a description in which a prefill and a decode node must be equal (proxy/nodes.py), and what sets
each: a flag, a variable, or the package to install in the same version."""


def check_cluster(nodes: Sequence[Described]) -> Iterator[Finding]:
    """Findings about more than one node; nodes of an unknown role are left to `check_node`."""
    yield Finding.of("cluster", "pairs", _pairs(nodes))
    for node in nodes:
        if verdict := _unpaired(node, nodes):
            yield Finding.of(node.where, "fits", verdict)
    yield Finding.of("cluster", "ranks", _ranks(nodes))
    yield Finding.of("cluster", "side channels", _side_channels(nodes))
    for node in nodes:
        if verdict := _loopback(node, nodes):
            yield Finding.of(node.where, "side channel", verdict)
    yield from _between_peers(nodes)


def _of(nodes: Sequence[Described], role: str) -> list[Described]:
    return [node for node in nodes if node.role == role]


def _difference(node: Described, peer: Described) -> str:
    """The first field in which the two differ, "" if they fit."""
    mine, theirs = node.description, peer.description
    return next((field for field in FLAGS if getattr(mine, field) != getattr(theirs, field)), "")


def _peers(node: Described, nodes: Sequence[Described]) -> list[Described]:
    return _of(nodes, DECODE if node.role == PREFILL else PREFILL)


def _pairs(nodes: Sequence[Described]) -> Verdict:
    prefill, decode = _of(nodes, PREFILL), _of(nodes, DECODE)
    for role, found in ((PREFILL, prefill), (DECODE, decode)):
        if not found:
            return error(f"no {role} node answered", f"lockstep {role} MODEL, listed at the proxy's --{role}")
    pairs = sum(not _difference(node, peer) for node in prefill for peer in decode)
    if not pairs:
        return error("no prefill node fits a decode node", "the values below")
    return ok(f"{pairs} of {len(prefill)} prefill and {len(decode)} decode node(s)")


def _unpaired(node: Described, nodes: Sequence[Described]) -> Verdict | None:
    peers = _peers(node, nodes)
    differences = [(peer, _difference(node, peer)) for peer in peers]
    if not differences or not all(field for _, field in differences):
        return None
    peer, field = differences[0]
    mine, theirs = getattr(node.description, field), getattr(peer.description, field)
    return error(f"{field} is {mine!r}, but {theirs!r} on {peer.where}", f"the same {FLAGS[field]} on both")


def _ranks(nodes: Sequence[Described]) -> Verdict:
    """A group over several hosts lists each of its ranks once."""
    groups: defaultdict[tuple[str, str], list[Described]] = defaultdict(list)
    for node in nodes:
        groups[node.role, node.description.group_id].append(node)
    for members in groups.values():
        found = sorted(rank.global_rank for node in members for rank in node.description.ranks)
        size = max(node.description.engine.data_parallel_size for node in members)
        if found != list(range(size)):
            text = f"the group of {members[0].where} has ranks {found} of {size}"
            return error(text, "a node for each host of the group, --data-parallel-start-rank of each")
    return ok(f"{sum(len(node.description.ranks) for node in nodes)} in {len(groups)} group(s)")


def _side_channels(nodes: Sequence[Described]) -> Verdict:
    """Peers find a rank by its address and know it by its id."""
    seen: dict[object, str] = {}
    for node in nodes:
        for rank in node.description.ranks:
            address = f"{rank.side_channel_host}:{rank.side_channel_port}"
            for identity, flag in ((address, "--side-channel-port"), (rank.engine_id, "an own start")):
                other = seen.setdefault(identity, node.where)
                if other != node.where:
                    return error(f"{identity} is of {other} and of {node.where}", f"{flag} of each node")
    return ok("each rank has its own")


def _loopback(node: Described, nodes: Sequence[Described]) -> Verdict | None:
    """A loopback address is right only if all nodes are on this one machine."""
    hosts = {rank.side_channel_host for rank in node.description.ranks}
    others = {r.side_channel_host for peer in _peers(node, nodes) for r in peer.description.ranks}
    if any(map(_is_loopback, hosts)) and not all(map(_is_loopback, others)):
        return error(
            f"peers cannot reach {', '.join(sorted(hosts))} from other machines",
            "--side-channel-host with this machine's address",
        )
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _between_peers(nodes: Sequence[Described]) -> Iterator[Finding]:
    for decode in _of(nodes, DECODE):
        for prefill in _of(nodes, PREFILL):
            if _difference(decode, prefill):
                continue
            pair = f"{decode.address} and {prefill.address}"
            for name, verdict in (
                ("lease", _lease(decode, prefill)),
                ("context", _context(decode, prefill)),
                ("tensor parallel", _tensor_parallel(decode, prefill)),
            ):
                yield Finding.of(pair, name, verdict)


def _lease(decode: Described, prefill: Described) -> Verdict:
    """A renewal extends prefill's lease to two thirds of it (vLLM nixl/base_worker.py:532).

    The time that a request queues on decode needs no lease of its own: decode renews from the request's
    arrival on (nixl/base_scheduler.py:199). What must fit is the renewal, with two of them lost.
    """
    renewal_s = decode.description.engine.kv_lease_renewal_s
    extension_s = prefill.description.engine.kv_lease_s * 2 // 3
    if 3 * renewal_s > extension_s:
        text = f"decode renews each {renewal_s:g} s, prefill extends by {extension_s:g} s"
        return error(text, "the same --kv-lease-s on both")
    return ok(f"renewed each {renewal_s:g} s, extended by {extension_s:g} s")


def _context(decode: Described, prefill: Described) -> Verdict:
    takes, serves = prefill.description.served_context_limit, decode.description.served_context_limit
    if takes < serves:
        text = f"prefill takes {takes} tokens, decode serves {serves}"
        return warning(text, f"--max-model-len {decode.description.max_model_len} on prefill")
    return ok(f"{serves} tokens")


def _tensor_parallel(decode: Described, prefill: Described) -> Verdict:
    mine, theirs = ({rank.tensor_parallel_size for rank in n.description.ranks} for n in (decode, prefill))
    if mine != theirs:
        text = f"{sorted(mine)} on decode, {sorted(theirs)} on prefill; nobody has run that"
        return warning(text, "the same --tensor-parallel-size")
    return ok(f"{min(mine, default=1)}")
