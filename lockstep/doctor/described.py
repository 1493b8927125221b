"""One node as the doctor sees it: its address and what it described."""

from dataclasses import dataclass

from lockstep.rpc.generated import lockstep_pb2 as pb

PREFILL, DECODE = "prefill", "decode"
_ROLES: dict[int, str] = {pb.ROLE_PREFILL: PREFILL, pb.ROLE_DECODE: DECODE}


@dataclass(frozen=True, slots=True)
class Described:
    """`address` is where it was asked."""

    address: str
    description: pb.NodeDescription

    @property
    def role(self) -> str:
        """ "prefill", "decode", or "node" for one that says neither."""
        return _ROLES.get(self.description.role, "node")

    @property
    def where(self) -> str:
        return f"{self.role} {self.address}"

    @property
    def width(self) -> int:
        """1 + K."""
        return 1 + int(self.description.num_speculative_tokens)
