"""Builds node descriptions for the tests of this folder."""

from lockstep.rpc.channel import PROTOCOL_VERSION
from lockstep.rpc.generated import lockstep_pb2 as pb
from proxy.nodes import Node, Role, from_description


def node(role: Role, address: str, num_ranks: int = 1, **described: object) -> Node:
    """A node with all fields that matter set; `described` overrides them."""
    values: dict[str, object] = {
        "protocol_version": PROTOCOL_VERSION,
        "role": pb.ROLE_PREFILL if role == "prefill" else pb.ROLE_DECODE,
        "group_id": address,
        "instance_id": address,
        "model": "m",
        "dtype": "float32",
        "block_size": 16,
        "ranks": [
            pb.RankDescription(
                global_rank=rank,
                local_rank=rank,
                engine_id=f"{address}_dp{rank}",
                side_channel_host="h",
                side_channel_port=5600 + rank,
                tensor_parallel_size=1,
                max_num_seqs=4,
                max_num_batched_tokens=100,
            )
            for rank in range(num_ranks)
        ],
    }
    return from_description(address, pb.NodeDescription(**{**values, **described}))
