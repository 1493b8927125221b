"""vllm-router in front of two plain vLLM servers, as its documentation starts them.

https://github.com/vllm-project/router, docs/model-routing/pd-disaggregation.md: prefill is a kv_producer,
decode a kv_consumer, `--vllm-pd-disaggregation`, `--policy consistent_hash`. The policies of its other one
are refused with one server a side: "Power-of-two policy for decode requires at least 2 decode workers".
"""

from pathlib import Path

from bench.peers import engines, patch
from bench.peers.environments import ROUTER
from bench.peers.processes import Layout, Program
from bench.proxy_peers import installed
from lockstep.cli.ports import PortPicker


def pull(directory: Path, ports: PortPicker, patched: bool) -> Layout:
    """NixlConnector: decode reads the KV from prefill."""
    return _layout("NixlConnector", directory, ports, patched)


def push(directory: Path, ports: PortPicker, patched: bool) -> Layout:
    """NixlPushConnector behind the same router, which does not know it and passes on what prefill answers."""
    return _layout("NixlPushConnector", directory, ports, patched)


def _layout(connector: str, directory: Path, ports: PortPicker, patched: bool) -> Layout:
    port, prefill, decode = ports.take(), ports.take(), ports.take()
    servers = tuple(
        engines.server(
            name,
            server_port,
            *engines.transfer_flags(connector, role),
            extra={**engines.side_channel(ports), **patch.environment(directory, patched)},
        )
        for name, server_port, role in (
            ("prefill", prefill, "kv_producer"),
            ("decode", decode, "kv_consumer"),
        )
    )
    argv = (str(installed(ROUTER) / ROUTER.command[0]), "--host", "127.0.0.1", "--port", str(port))
    argv += ("--vllm-pd-disaggregation", "--prefill", f"http://127.0.0.1:{prefill}")
    argv += ("--decode", f"http://127.0.0.1:{decode}")
    argv += ("--policy", "consistent_hash")
    argv += ("--prometheus-host", "127.0.0.1", "--prometheus-port", str(ports.take()))
    # Its default looks at the servers every 30 s while they start: that would count as its time to start.
    argv += ("--worker-startup-check-interval", "1", "--log-level", "warning")
    return Layout(f"http://127.0.0.1:{port}", (*servers, Program("vllm-router", argv, engines.environment())))
