"""What our scheduler side tells our worker side each step, on top of vLLM's NIXL metadata."""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

from kv_transfer.params import PrefillPeer
from kv_transfer.push_plan import Chunk
from kv_transfer.stall import Question


@dataclass(frozen=True, slots=True)
class CancelOrder:
    """Decode finished with a request before its KV arrived.

    `allocated`: its blocks were given to the worker to register, and the worker knows how far that got.
    """

    request_id: str
    peer: PrefillPeer
    token: str
    reason: str
    allocated: bool


class LockstepConnectorMetadata(NixlConnectorMetadata):
    """`NixlConnectorMetadata` with our orders; pickled to workers when the executor has several processes."""

    def __init__(self) -> None:
        super().__init__()
        # Decode: requests that ended before their KV arrived.
        self.cancels: list[CancelOrder] = []
        # Decode: requests to ask prefill about, while nothing moves here.
        self.questions: list[Question] = []
        # Prefill: the token of each entry of `push_finished_blocks` and of `chunks`.
        self.tokens: dict[str, str] = {}
        # Prefill: what this step computes of requests that a decode node waits for.
        self.chunks: dict[str, Chunk] = {}
        # Prefill: the token of each request whose first token this step samples, to be handed over.
        self.first_tokens: dict[str, str] = {}
        # Prefill: requests whose blocks were taken away before this step.
        self.preempted: list[str] = []
        # Prefill: requests that ended without blocks to push, with the reason.
        self.ended: dict[str, str] = {}
        # Prefill: finished requests whose held blocks nobody wants any more, with the reason.
        self.abandoned: dict[str, str] = {}
