"""Every system of the comparison, by the key that `--systems` takes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.peers import dynamo, ours, smg, vllm_router
from bench.peers.processes import Layout
from lockstep.cli.ports import PortPicker


@dataclass(frozen=True, slots=True)
class Candidate:
    """A system to compare. `layout` installs what it needs and says what to start, or raises StartError."""

    key: str
    name: str
    layout: Callable[[Path, PortPicker], Layout]
    disaggregated_peer: bool = True


LOCKSTEP = "lockstep"
PLAIN = "plain"

CANDIDATES = (
    Candidate(LOCKSTEP, "Lockstep, 1 P + 1 D rank", ours.lockstep, disaggregated_peer=False),
    Candidate(PLAIN, "plain vLLM, one server", ours.plain, disaggregated_peer=False),
    Candidate("router-pull", "vllm-router 0.1.17, NixlConnector", vllm_router.pull),
    Candidate("router-push", "vllm-router 0.1.17, NixlPushConnector", vllm_router.push),
    Candidate("smg", "smg 1.13.0, gRPC, NixlConnector", smg.grpc),
    Candidate("dynamo", "Dynamo 1.6.1 (vLLM 0.31), NixlConnector", dynamo.disaggregated),
    Candidate(
        "router-pull-asleep",
        "vllm-router 0.1.17, NixlConnector, NIXL's thread asleep",
        vllm_router.pull_asleep,
        disaggregated_peer=False,  # nobody gets this without a patch: it shows what the spinning thread costs
    ),
)
