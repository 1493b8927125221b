"""NVIDIA Dynamo, disaggregated, without etcd or NATS, as its example starts it.

https://github.com/ai-dynamo/dynamo, examples/backends/vllm/launch/disagg.sh: a frontend, a decode and a
prefill worker with NixlConnector in the role kv_both. The discovery store is a folder, requests go over TCP.
Its engines are vLLM 0.31, which it was built for.
"""

import sys
from pathlib import Path

from bench.peers import engines, patch
from bench.peers.environments import DYNAMO, laid_over
from bench.peers.processes import Layout, Program
from lockstep.cli.ports import PortPicker

SITE = Path(__file__).with_name("dynamo_site")


def disaggregated(directory: Path, ports: PortPicker, patched: bool) -> Layout:
    port = ports.take()
    store = directory / "store"
    store.mkdir()
    shared = {
        **{"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(store)},
        **{"DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"},
    }
    python = (sys.executable, "-P", "-m")
    frontend = (*python, "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port))
    packages = laid_over(DYNAMO)
    engine = shared | patch.environment(directory, patched, packages, SITE)
    workers = tuple(
        Program(
            mode,
            (
                *(*python, "dynamo.vllm", *engines.PLAIN_FLAGS, "--disaggregation-mode", mode),
                *engines.transfer_flags("NixlConnector", "kv_both"),
            ),
            engines.environment(**engine, **engines.side_channel(ports), DYN_SYSTEM_PORT=str(ports.take())),
        )
        for mode in ("prefill", "decode")
    )
    shared["PYTHONPATH"] = str(packages)
    programs = (Program("frontend", frontend, engines.environment(**shared)), *workers)
    return Layout(f"http://127.0.0.1:{port}", programs)
