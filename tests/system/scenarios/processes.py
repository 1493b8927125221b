"""The engine processes of a node: to stop, let go on or kill, and to wait for a node that comes back."""

import asyncio
import os
import signal

import httpx
import psutil
from system.harness import Node, Stack, wait_until

RESTART_S = 240.0


def engines(node: Node, name: str = "EngineCore") -> list[int]:
    """Engine core processes of a node whose title has `name`: vLLM titles them VLLM::EngineCore_DP<rank>."""
    children = psutil.Process(node.pid).children(recursive=True)
    return [child.pid for child in children if any(name in part for part in child.cmdline())]


def signal_engine(node: Node, number: signal.Signals, name: str = "EngineCore") -> None:
    """To the one engine core process whose title has `name`."""
    (engine,) = engines(node, name)
    os.kill(engine, number)


def ready(node: Node) -> bool:
    try:
        return httpx.get(f"{node.http_url}/readyz", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


async def comes_back(stack: Stack, old: Node) -> None:
    """`lockstep up` has started the node again, and the proxy takes requests."""

    def back() -> bool:
        new = stack.node(old.role)
        return new.pid != old.pid and ready(new)

    await asyncio.to_thread(wait_until, back, f"the {old.role} node is back", RESTART_S, 0.5)
    await asyncio.to_thread(wait_until, lambda: ready(stack.node("proxy")), "the proxy is ready", 30.0)
