"""The real NIXL agent: its progress thread sleeps or spins as configured, and it carries our notices."""

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kv_transfer.agent import agent_class, agent_for_worker
from kv_transfer.config import ConnectorOptions
from kv_transfer.notices import Cancel, DecodePeer, Released, decode_notice, encode_notice

_IDLE_AGENT = """
import sys, time
from nixl._api import nixl_agent
from kv_transfer.agent import agent_class
agent = agent_class(nixl_agent, int(sys.argv[1]))("idle-agent")
time.sleep(0.5)
cpu, wall = time.process_time(), time.monotonic()
time.sleep(2.0)
print("share", (time.process_time() - cpu) / (time.monotonic() - wall))
"""


def idle_cpu_share(progress_delay_us: int) -> float:
    """CPU seconds per second of a process that holds one idle agent."""
    done = subprocess.run(
        [sys.executable, "-c", _IDLE_AGENT, str(progress_delay_us)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return float(done.stdout.rsplit("share", 1)[1])


def test_idle_agent_with_a_delay_sleeps() -> None:
    """With our delay an idle engine's agent costs less than a twentieth of a core."""
    assert idle_cpu_share(ConnectorOptions().nixl_progress_delay_us) < 0.05


def test_idle_agent_without_a_delay_spins() -> None:
    """With NIXL's own delay of 0 it burns a core, so the test above can fail.

    On a busy machine the spinning thread gets its share only, hence the low bound.
    """
    assert idle_cpu_share(0) > 0.3


@pytest.fixture
def agents() -> Iterator[tuple[Any, Any]]:
    """Two connected agents of one process."""
    from nixl._api import nixl_agent

    new_agent = agent_class(nixl_agent, 1000)
    left, right = new_agent("left"), new_agent("right")
    left.add_remote_agent(right.get_agent_metadata())
    right.add_remote_agent(left.get_agent_metadata())
    yield left, right
    left.remove_remote_agent("right")
    right.remove_remote_agent("left")


def next_notice(agent: Any, sender: str, deadline_s: float = 10.0) -> bytes:
    """Poll until a notification of `sender` arrives."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if received := agent.get_new_notifs().get(sender):
            return bytes(received[0])
        time.sleep(0.001)
    raise AssertionError(f"no notification within {deadline_s} s")


def test_cancel_and_its_answer_travel(agents: tuple[Any, Any]) -> None:
    """What one side encodes the other decodes, in both directions, over a real agent."""
    decode, prefill = agents
    peer = DecodePeer("d0", "127.0.0.1", 5700, 1)
    cancel = Cancel(request_id="ls-1-0-a1", token="a" * 32, reason="aborted", registered=True, peer=peer)
    released = Released("ls-1-0-a1", "a" * 32, "aborted", 1)
    decode.send_notif("right", encode_notice(cancel))
    assert decode_notice(next_notice(prefill, "left")) == cancel
    prefill.send_notif("left", encode_notice(released))
    assert decode_notice(next_notice(decode, "right")) == released


def test_vllm_makes_our_agent_only_while_asked() -> None:
    """vLLM's worker finds our class under the name that it uses, and its own again afterwards."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    stock = base_worker.NixlWrapper
    with agent_for_worker(1000):
        assert base_worker.NixlWrapper is not stock
        assert issubclass(base_worker.NixlWrapper, stock)
    assert base_worker.NixlWrapper is stock
