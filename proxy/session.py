"""Keeps one bidirectional stream to one node open: describes, opens, reads, reconnects."""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import grpc.aio
from vllm.version import __version__ as VLLM_VERSION  # noqa: N812

from lockstep.rpc.channel import PROTOCOL_VERSION, connect
from lockstep.rpc.credentials import NO_CREDENTIALS, Credentials
from lockstep.rpc.generated import lockstep_pb2 as pb
from lockstep.rpc.generated.lockstep_pb2_grpc import NodeStub
from proxy.cluster import REFUSED
from proxy.nodes import Node, Role, from_description

logger = logging.getLogger(__name__)

_BACKOFF_FIRST_S = 0.2
_BACKOFF_MOST_S = 3.0
_WARMING_POLL_S = 0.5
_REASON_CHARACTERS = 200


class SessionEvents(Protocol):
    """What a session reports; all calls come from the event loop, in order."""

    def node_up(self, session: "NodeSession", node: Node, loads: Sequence[pb.RankLoad]) -> None:
        """The stream is open and takes requests."""

    def node_down(self, address: str, reason: str) -> None:
        """The node takes no requests; whatever was in flight on an open stream is lost."""

    def frame(self, address: str, frame: pb.NodeFrame) -> None:
        """The node sent something."""


class _NotReadyError(Exception):
    """The node answers but cannot be used now; the message says why."""


class NodeSession:
    """Owns the channel to `address` and the task that keeps the stream open."""

    def __init__(
        self,
        address: str,
        role: Role,
        proxy_id: str,
        timeout_s: float,
        events: SessionEvents,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        self.address = address
        self._role = role
        self._proxy_id = proxy_id
        self._timeout_s = timeout_s
        self._events = events
        self._credentials = credentials
        self._outgoing: asyncio.Queue[pb.ProxyFrame | None] | None = None
        self._last_reason = ""
        self._task: asyncio.Task[None] | None = None
        self._stub: NodeStub | None = None

    def start(self) -> None:
        """Begin connecting in the background."""
        self._task = asyncio.create_task(self._run(), name=f"session {self.address}")

    async def close(self) -> None:
        """End the stream, which aborts this proxy's requests on the node, and wait for the task."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def add(self, request_id: str, rank: int, request: list[bytes]) -> None:
        """Send a leg; dropped when no stream is open, since `node_down` then fails what was in flight."""
        self._put(pb.ProxyFrame(add=pb.AddRequest(request_id=request_id, rank=rank, request=request)))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort legs; the node ignores ids that it does not have (any more)."""
        self._put(pb.ProxyFrame(abort=pb.AbortRequests(request_ids=request_ids)))

    def announce(self, engine_ids: Sequence[str]) -> None:
        """Tell a prefill node to which decode engines KV may go, before legs that need them."""
        self._put(pb.ProxyFrame(decode_engines=pb.DecodeEngines(engine_ids=engine_ids)))

    def ask_kv_blocks(self, rank: int) -> None:
        """Have the node tell anew what the prefix cache of a rank has."""
        self._put(pb.ProxyFrame(kv_blocks=pb.KVBlocksRequest(rank=rank)))

    async def status(self, timeout_s: float) -> pb.NodeStatus:
        """What the node has done so far. Raises AioRpcError; call it only on a session that was up."""
        assert self._stub is not None
        status: pb.NodeStatus = await self._stub.Status(
            pb.StatusRequest(), timeout=timeout_s, metadata=self._credentials.metadata
        )
        return status

    def _put(self, frame: pb.ProxyFrame) -> None:
        if self._outgoing is not None:
            self._outgoing.put_nowait(frame)

    async def _run(self) -> None:
        async with connect(self.address, self._credentials) as channel:
            self._stub = stub = NodeStub(channel)
            wait_s = _BACKOFF_FIRST_S
            while True:
                opened = False
                try:
                    node = await self._describe(stub)
                    opened = await self._stream(stub, node)
                    reason = "the session ended"
                except _NotReadyError as error:
                    reason, wait_s = str(error), _WARMING_POLL_S
                except grpc.aio.AioRpcError as error:
                    reason = f"{error.code().name.lower()}: {error.details() or ''}"[:_REASON_CHARACTERS]
                except TimeoutError:
                    reason = f"no answer within {self._timeout_s:g} s"
                except Exception:  # this task's supervisor: a bad frame must not end the session for good
                    logger.exception("session with %s node %s failed", self._role, self.address)
                    reason = "the session failed"
                self._down(reason)
                if opened:
                    wait_s = _BACKOFF_FIRST_S
                # Jitter keeps proxies from coming back in step after a node's restart.
                await asyncio.sleep(wait_s * random.uniform(0.8, 1.2))
                wait_s = min(2 * wait_s, _BACKOFF_MOST_S)

    async def _describe(self, stub: NodeStub) -> Node:
        description = await stub.Describe(
            pb.DescribeRequest(), timeout=self._timeout_s, metadata=self._credentials.metadata
        )
        try:
            node = from_description(self.address, description)
        except ValueError as error:
            raise _NotReadyError(f"{REFUSED}{error}") from error
        if node.role != self._role:
            raise _NotReadyError(f"{REFUSED}it is a {node.role} node, but listed under --{self._role}")
        if _release(description.vllm_version) != _release(VLLM_VERSION):
            # vLLM's own structs travel in the session, and have other fields in another version.
            raise _NotReadyError(
                f"{REFUSED}it runs vLLM {description.vllm_version}, this proxy {VLLM_VERSION}; "
                "it needs proxies of its version"
            )
        if not description.ready:
            raise _NotReadyError("it is warming up")
        return node

    async def _stream(self, stub: NodeStub, node: Node) -> bool:
        """Run one stream until it ends; returns True if it was ever open, and never raises once it was."""
        outgoing: asyncio.Queue[pb.ProxyFrame | None] = asyncio.Queue()
        hello = pb.Hello(protocol_version=PROTOCOL_VERSION, proxy_id=self._proxy_id)
        outgoing.put_nowait(pb.ProxyFrame(hello=hello))
        call = stub.Session(_frames(outgoing), metadata=self._credentials.metadata)
        try:
            first = await asyncio.wait_for(call.read(), self._timeout_s)
            if first is grpc.aio.EOF or first.WhichOneof("frame") != "welcome":
                raise _NotReadyError("it did not welcome this proxy")
            if first.welcome.instance_id != node.instance_id:
                raise _NotReadyError("it restarted meanwhile")
            self._outgoing = outgoing
            self._last_reason = ""
            logger.info("connected to %s node %s", node.role, self.address)
            self._events.node_up(self, node, first.welcome.loads)
            await self._read(call)
            return True
        finally:
            self._outgoing = None
            outgoing.put_nowait(None)
            call.cancel()

    async def _read(self, call: grpc.aio.StreamStreamCall) -> None:
        try:
            while (frame := await call.read()) is not grpc.aio.EOF:
                if frame.WhichOneof("frame") == "draining":
                    logger.info("%s node %s drains", self._role, self.address)
                self._events.frame(self.address, frame)
        except grpc.aio.AioRpcError as error:
            logger.warning("session with %s node %s broke: %s", self._role, self.address, error.code().name)

    def _down(self, reason: str) -> None:
        """Report, and log each new reason once, so that a node that is away for long fills no log."""
        if reason != self._last_reason:
            logger.warning("%s node %s: %s", self._role, self.address, reason)
            self._last_reason = reason
        self._events.node_down(self.address, reason)


def _release(version: str) -> str:
    """Without the part that tells builds of one version apart."""
    return version.partition("+")[0]


async def _frames(outgoing: "asyncio.Queue[pb.ProxyFrame | None]") -> AsyncIterator[pb.ProxyFrame]:
    while (frame := await outgoing.get()) is not None:
        yield frame
