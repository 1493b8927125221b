"""Every system of the comparison, by the key that `--systems` takes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.peers import dynamo, ours, smg, vllm_router
from bench.peers.figures import LOCKSTEP, PATCHED, PLAIN
from bench.peers.processes import Layout
from lockstep.cli.ports import PortPicker


@dataclass(frozen=True, slots=True)
class Candidate:
    """A system to compare. `layout` installs what it needs and says what to start, or raises StartError."""

    key: str
    name: str
    layout: Callable[[Path, PortPicker], Layout]
    disaggregated_peer: bool = True


PEERS = (
    ("router-pull", "vllm-router 0.1.17, NixlConnector", vllm_router.pull),
    ("router-push", "vllm-router 0.1.17, NixlPushConnector", vllm_router.push),
    ("smg", "smg 1.13.0, gRPC, NixlConnector", smg.grpc),
    ("dynamo", "Dynamo 1.6.1 (vLLM 0.31), NixlConnector", dynamo.disaggregated),
)

CANDIDATES = (
    Candidate(LOCKSTEP, "Lockstep, 1 P + 1 D rank", ours.lockstep, disaggregated_peer=False),
    Candidate(PLAIN, "plain vLLM, one server", ours.plain, disaggregated_peer=False),
    *(Candidate(key, name, partial(layout, patched=False)) for key, name, layout in PEERS),
    # What nobody gets without a patch: it takes out of the comparison what only few cores suffer from.
    *(
        Candidate(f"{key}{PATCHED}", f"{name}, patched", partial(layout, patched=True))
        for key, name, layout in PEERS
    ),
)
