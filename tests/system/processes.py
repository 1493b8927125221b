"""The processes of a node: to stop, let go on or kill them, and to wait for a node that comes back."""

import asyncio
import os
import signal

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


def kill_all(pid: int) -> None:
    """SIGKILL to a node and all that it started, as when its machine goes away."""
    parent = psutil.Process(pid)
    for process in [*parent.children(recursive=True), parent]:
        process.kill()


async def comes_back(stack: Stack, old: Node) -> None:
    """`lockstep up` has started the node again, and the proxy takes requests."""

    def back() -> bool:
        new = stack.node(old.role)
        return new.pid != old.pid and new.ready()

    await asyncio.to_thread(wait_until, back, f"the {old.role} node is back", RESTART_S, 0.5)
    await asyncio.to_thread(wait_until, lambda: stack.node("proxy").ready(), "the proxy is ready", 30.0)
