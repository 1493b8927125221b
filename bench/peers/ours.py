"""How Lockstep and plain vLLM are started: what a user of either would type."""

import os
from pathlib import Path

from bench.load import PICO
from bench.peers import engines
from bench.peers.processes import Layout, Program
from bench.sim_processes import LOCKSTEP
from lockstep.cli.ports import PortPicker


def lockstep(directory: Path, ports: PortPicker) -> Layout:
    """`lockstep up` with one decode rank, and as many rows an engine as the others have."""
    port = ports.take()
    rows = f"--max-num-seqs={engines.MAX_NUM_SEQS}"
    argv = (LOCKSTEP, "up", str(PICO), "--port", str(port), "--state-dir", str(directory / "state"))
    argv += ("--decode-ranks", "1", f"--prefill-arg={rows}", f"--decode-arg={rows}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return Layout(f"http://127.0.0.1:{port}", (Program("lockstep", argv, environment),))


def plain(directory: Path, ports: PortPicker) -> Layout:
    """One vLLM server, which has both cores to itself."""
    port = ports.take()
    return Layout(f"http://127.0.0.1:{port}", (engines.server("vllm", port),))
