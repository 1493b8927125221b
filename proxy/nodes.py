"""What a node says about itself (`Describe`), as values, and which nodes fit together."""

from dataclasses import dataclass, fields
from typing import Literal

from lockstep.rpc.channel import PROTOCOL_VERSION
from lockstep.rpc.generated import lockstep_pb2 as pb

Role = Literal["prefill", "decode"]

_ROLES: dict[int, Role] = {pb.ROLE_PREFILL: "prefill", pb.ROLE_DECODE: "decode"}


@dataclass(frozen=True, slots=True)
class CompatibilityKey:
    """Everything in which two nodes must be equal for the KV of one to be right on the other."""

    model: str
    revision: str
    tokenizer_hash: str
    generation_config_hash: str
    dtype: str
    kv_cache_dtype: str
    block_size: int
    num_speculative_tokens: int
    speculative_method: str
    speculative_config: str
    """As JSON, with the drafter's model: eagle heads of other weights draft other tokens, with other KV."""
    hash_seed: str
    hash_algorithm: str
    vllm_version: str
    nixl_version: str
    connector_version: str
    lockstep_version: str

    def difference(self, other: "CompatibilityKey") -> tuple[str, object, object] | None:
        """The first field that differs, with this key's value and the other's."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return field.name, mine, theirs
        return None


@dataclass(frozen=True, slots=True)
class Rank:
    """One data-parallel rank of a node."""

    global_rank: int
    local_rank: int
    engine_id: str
    side_channel_host: str
    side_channel_port: int
    tensor_parallel_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_kv_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """One node as described at its last connect; `address` is where the proxy reaches it."""

    address: str
    role: Role
    group_id: str
    instance_id: str
    key: CompatibilityKey
    ranks: tuple[Rank, ...]
    description: pb.NodeDescription


def from_description(address: str, description: pb.NodeDescription) -> Node:
    """Read a description. Raises ValueError for one that this proxy cannot work with, saying why."""
    if description.protocol_version != PROTOCOL_VERSION:
        raise ValueError(
            f"it speaks protocol version {description.protocol_version}, this proxy {PROTOCOL_VERSION}"
        )
    if description.role not in _ROLES:
        raise ValueError("its role is neither prefill nor decode")
    if not description.ranks:
        raise ValueError("it has no ranks")
    key = CompatibilityKey(**{f.name: getattr(description, f.name) for f in fields(CompatibilityKey)})
    ranks = tuple(Rank(**{f.name: getattr(rank, f.name) for f in fields(Rank)}) for rank in description.ranks)
    return Node(
        address=address,
        role=_ROLES[description.role],
        group_id=description.group_id,
        instance_id=description.instance_id,
        key=key,
        ranks=ranks,
        description=description,
    )
