"""Whether a prefill process is proven dead, asked of real sockets and vLLM's own handshake listener."""

import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlAgentMetadata,
    NixlHandshakePayload,
)

from kv_transfer.peers import process_is_gone


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture(scope="module")
def listener_port() -> Iterator[int]:
    """vLLM's listener, serving the metadata of engine 'alive'."""
    metadata = NixlAgentMetadata(
        engine_id="alive",
        agent_metadata=b"",
        kv_caches_base_addr=[],
        device_id=0,
        num_blocks=1,
        block_lens=[],
        block_strides=[],
        kv_cache_layout="LBHNC",
        block_size=16,
        ssm_sizes=(0, 0),
        attn_backend_name="CPU_ATTN",
        physical_blocks_per_logical_kv_block=1,
    )
    encode = msgspec.msgpack.encode
    payload = encode(NixlHandshakePayload(compatibility_hash="h", agent_metadata_bytes=encode(metadata)))
    ready, stop, port = threading.Event(), threading.Event(), free_port()
    thread = threading.Thread(
        target=NixlBaseConnectorScheduler._nixl_handshake_listener,
        args=({(0, 0): payload}, ready, stop, "127.0.0.1", port),
    )
    thread.start()
    assert ready.wait(10)
    yield port
    stop.set()
    thread.join(10)


def test_nothing_listens() -> None:
    """The listener lives as long as its process, so a refused connection proves its end."""
    assert process_is_gone("127.0.0.1", free_port(), "alive")


def test_the_same_engine_answers(listener_port: int) -> None:
    """It is alive, so its writes may still come."""
    assert not process_is_gone("127.0.0.1", listener_port, "alive")


def test_another_engine_answers(listener_port: int) -> None:
    """The port was taken over by a restarted node."""
    assert process_is_gone("127.0.0.1", listener_port, "its-predecessor")


def test_silence_proves_nothing() -> None:
    """A process that does not answer in time may be slow, and write later."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        assert not process_is_gone("127.0.0.1", sock.getsockname()[1], "alive")
