"""smg in front of two vLLM engines behind its gRPC servicer, as its documentation starts them.

https://github.com/lightseekorg/smg, docs/getting-started/pd-disaggregation.md: vLLM's gRPC entry point with
NixlConnector on both sides, `--pd-disaggregation`, grpc:// URLs, `--model-path` for the tokenizer. The module
it names, vllm.entrypoints.grpc_server, is vllm.entrypoints.launchers.grpc_server in vLLM 0.32.
"""

import sys
from pathlib import Path

from bench.load import PICO
from bench.peers import engines, patch
from bench.peers.environments import SERVICER, SMG, laid_over
from bench.peers.processes import Layout, Program
from bench.proxy_peers import installed
from lockstep.cli.ports import PortPicker

GRPC_SERVER = (sys.executable, "-P", "-m", "vllm.entrypoints.launchers.grpc_server")


def grpc(directory: Path, ports: PortPicker, patched: bool) -> Layout:
    port, prefill, decode = ports.take(), ports.take(), ports.take()
    servicer = patch.environment(directory, patched, laid_over(SERVICER))
    servers = tuple(
        Program(
            name,
            (
                *(*GRPC_SERVER, *engines.PLAIN_FLAGS, "--host", "127.0.0.1", "--port", str(server_port)),
                *engines.transfer_flags("NixlConnector", role),
            ),
            engines.environment(**servicer, **engines.side_channel(ports)),
        )
        for name, server_port, role in (
            ("prefill", prefill, "kv_producer"),
            ("decode", decode, "kv_consumer"),
        )
    )
    argv = (str(installed(SMG) / SMG.command[0]), *SMG.command[1:])
    argv += ("--host", "127.0.0.1", "--port", str(port), "--pd-disaggregation", "--backend", "vllm")
    argv += ("--prefill", f"grpc://127.0.0.1:{prefill}", "--decode", f"grpc://127.0.0.1:{decode}")
    argv += ("--model-path", str(PICO), "--log-level", "warn")
    argv += ("--prometheus-host", "127.0.0.1", "--prometheus-port", str(ports.take()))
    argv += ("--worker-startup-check-interval", "1")
    return Layout(f"http://127.0.0.1:{port}", (*servers, Program("smg", argv, engines.environment())))
