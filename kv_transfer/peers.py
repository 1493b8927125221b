"""How the writer thread reaches another engine's workers: handshake first, then notifications.

Uses vLLM's handshake (base_worker.py `_ensure_handshake`), which runs on a thread of its own, one at a time.
"""

import queue
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    GET_META_MSG,
    NixlAgentMetadata,
    NixlHandshakePayload,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import zmq_ctx
from vllm.logger import init_logger
from vllm.utils.network_utils import make_zmq_path

from kv_transfer.notices import DecodePeer
from kv_transfer.params import PrefillPeer

logger = init_logger(__name__)

_PROBE_TIMEOUT_S = 1.0

Work = Callable[[], None]


class PeerLinks:
    """The connections of one NIXL worker. Every method but `drop_lost` is for the writer thread.

    `consumer`: of a decode worker, which never writes. `on_lost` gets each engine that is lost.
    """

    def __init__(
        self,
        worker: Any,
        on_writer: Callable[[Work], None],
        on_lost: Callable[[str], None],
        *,
        consumer: bool,
    ) -> None:
        self._worker = worker
        self._on_lost = on_lost
        self._on_writer = on_writer
        self._consumer = consumer
        self.announced: frozenset[str] | None = None
        """The decode engines that may be written to; None: any. Set as a whole, on any thread."""
        self._lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._probes: dict[str, list[Work]] = {}  # by engine: whom to tell that its process has ended

    def with_prefill(self, peer: PrefillPeer, ready: Work, failed: Work) -> None:
        """Run `ready` on the writer thread once connected to a prefill rank, or `failed`."""
        address = (peer.engine_id, peer.side_channel_host, peer.side_channel_port, peer.tp_size)
        self._with_peer(address, ready, failed)

    def with_decode(self, peer: DecodePeer, ready: Work, failed: Work) -> None:
        """Run `ready` on the writer thread once we can write to a decode rank, or `failed`.

        An engine that was not announced could otherwise have us connect to whatever it names.
        """
        if not self._is_announced(peer.engine_id):
            logger.warning("engine %s at %s:%d was not announced", peer.engine_id, peer.host, peer.port)
            failed()
            return
        self._with_peer((peer.engine_id, peer.host, peer.port, peer.tp_size), ready, failed)

    def is_connected(self, engine_id: str) -> bool:
        """Whether we shook hands with it, and may write to it."""
        return self._is_announced(engine_id) and self._is_known(engine_id)

    def notify(self, engine_id: str, data: bytes) -> bool:
        """Send to every worker of the engine that we shook hands with; False if any send failed."""
        with self._worker._handshake_lock:
            agents = list(self._worker._remote_agents.get(engine_id, {}).values())
        ok = bool(agents)
        for agent_name in agents:
            try:
                self._worker.nixl_wrapper.send_notif(agent_name, notif_msg=data)
            except Exception as error:  # noqa: BLE001 - NIXL's errors have no common base but Exception
                logger.warning("NIXL could not notify engine %s: %s", engine_id, error)
                ok = False
        if not ok:
            self.lost(engine_id)
        return ok

    def lost(self, engine_id: str) -> None:
        """NIXL could not reach the engine: its next use shakes hands again, once nothing is in flight.

        A connection that broke stays broken until then, even if the process at the other end lives.
        """
        self._lost.put(engine_id)
        self._on_lost(engine_id)

    def drop_lost(self) -> None:
        """Forget engines that were lost.

        For the thread that uses the connections besides the writer: decode's engine thread, which sends the
        heartbeats over the same table; prefill has no such thread, so there it is the writer itself.
        """
        if self._lost.empty():
            return
        busy = self._worker._engines_with_inflight_transfers()
        for engine_id in {self._lost.get_nowait() for _ in range(self._lost.qsize())}:
            known = self._is_known(engine_id)
            if known and engine_id in busy:
                self._lost.put(engine_id)  # a write to it may be in flight
            elif known:
                self._drop(engine_id)

    def if_gone(self, peer: PrefillPeer, gone: Work) -> None:
        """Run `gone` on the writer thread if the peer's process is proven to have ended.

        One probe an engine at a time: a frozen peer must not keep handshakes with others waiting.
        """
        waiting = self._probes.setdefault(peer.engine_id, [])
        waiting.append(gone)
        if len(waiting) > 1:
            return

        def probe() -> None:
            dead = process_is_gone(peer.side_channel_host, peer.side_channel_port, peer.engine_id)
            self._on_writer(lambda: answer(dead))

        def answer(dead: bool) -> None:
            told = self._probes.pop(peer.engine_id)
            for one in told if dead else ():
                one()

        self._worker._handshake_initiation_executor.submit(probe)

    def _is_announced(self, engine_id: str) -> bool:
        return self.announced is None or engine_id in self.announced

    def _is_known(self, engine_id: str) -> bool:
        with self._worker._handshake_lock:
            return engine_id in self._worker._remote_agents

    def _drop(self, engine_id: str) -> None:
        """vLLM still looks it up for receives that end later (base_worker.py `get_transfer_results`)."""
        topology = self._worker.transfer_topo
        info = topology.get_engine_info(engine_id) if self._consumer else None
        self._worker._cleanup_remote_engine(engine_id)
        if info is not None:
            topology.register_remote_engine(engine_id, info)

    def _with_peer(self, address: tuple[str, str, int, int], ready: Work, failed: Work) -> None:
        future = self._worker._ensure_handshake(*address)
        if future is None:
            ready()
            return

        def done(handshake: Any) -> None:
            # vLLM's own callback has logged a failure.
            self._on_writer(ready if handshake.exception() is None else failed)

        future.add_done_callback(done)


def process_is_gone(host: str, port: int, engine_id: str) -> bool:
    """Whether the process that served `engine_id` at this side channel has certainly ended.

    Its listener lives as long as the process (base_scheduler.py `_nixl_handshake_listener`): nothing listens
    there any more, or another engine does. A timeout proves nothing.
    """
    try:
        socket.create_connection((host, port), timeout=_PROBE_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    try:
        with zmq_ctx(zmq.REQ, make_zmq_path("tcp", host, port)) as sock:  # type: ignore[attr-defined]
            sock.setsockopt(zmq.RCVTIMEO, int(_PROBE_TIMEOUT_S * 1000))  # type: ignore[attr-defined]
            sock.send(msgspec.msgpack.encode((GET_META_MSG, 0, 0)))
            payload = msgspec.msgpack.decode(sock.recv_multipart()[0], type=NixlHandshakePayload)
        metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=NixlAgentMetadata)
    except (zmq.ZMQError, msgspec.MsgspecError):  # type: ignore[attr-defined]
        return False
    return bool(metadata.engine_id != engine_id)
