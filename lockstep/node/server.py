"""The gRPC service of a node: Describe, Status, and the session by which a proxy adds and aborts requests."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Protocol

import grpc.aio
import msgspec
from grpc_health.v1 import health, health_pb2
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection
from vllm.v1.engine.exceptions import EngineDeadError

from lockstep.errors import ConfigError, DrainingError, InvalidRequestError, LockstepError, UnavailableError
from lockstep.node.drain import Drain
from lockstep.node.engine_cores import EngineCores
from lockstep.node.role import Role
from lockstep.node.sessions import ProxySession, SessionRegistry
from lockstep.rpc import codec
from lockstep.rpc.channel import PROTOCOL_VERSION, listen, make_server
from lockstep.rpc.credentials import NO_CREDENTIALS, Credentials
from lockstep.rpc.generated import lockstep_pb2 as pb
from lockstep.rpc.generated import lockstep_pb2_grpc

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Node"].full_name


class NodeState(Protocol):
    """What the service needs to know of the process around it."""

    @property
    def engine(self) -> EngineCores | None: ...

    @property
    def description(self) -> pb.NodeDescription | None: ...

    @property
    def ready(self) -> bool: ...

    @property
    def draining(self) -> bool: ...

    @property
    def drain(self) -> Drain: ...

    def loads(self) -> list[pb.RankLoad]: ...

    def status(self) -> pb.NodeStatus | None: ...


class NodeService(lockstep_pb2_grpc.NodeServicer):
    """One instance a node; all state of a proxy is in its Session."""

    def __init__(self, role: Role, state: NodeState, registry: SessionRegistry) -> None:
        self._role = role
        self._state = state
        self._registry = registry

    async def Describe(  # noqa: N802 - the name is the protocol's
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> pb.NodeDescription:
        description = self._state.description
        if description is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engines are still starting")
            raise AssertionError("abort raises")
        answer = pb.NodeDescription()
        answer.CopyFrom(description)
        answer.ready = self._state.ready
        return answer

    async def Status(  # noqa: N802 - the name is the protocol's
        self, request: pb.StatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.NodeStatus:
        status = self._state.status()
        if status is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engines are still starting")
            raise AssertionError("abort raises")
        return status

    async def Drain(  # noqa: N802 - the name is the protocol's
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.DrainProgress]:
        logger.info("asked to drain by %s", context.peer())
        self._state.drain.ask(request.timeout_s if request.HasField("timeout_s") else None, request.move)
        async for progress in self._state.drain.progress():
            yield progress

    async def Session(  # noqa: N802 - the name is the protocol's
        self, frames: AsyncIterator[pb.ProxyFrame], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.NodeFrame]:
        session = await self._greet(frames, context)
        self._registry.open(session)
        session.send(
            pb.NodeFrame(
                welcome=pb.Welcome(instance_id=self._description().instance_id, loads=self._state.loads())
            )
        )
        self._registry.kv_blocks.greet(session.send)
        reader = asyncio.create_task(self._read(frames, session), name=f"session-{session.proxy_id}")
        reader.add_done_callback(lambda _: session.end())
        try:
            while (frame := await session.next_frame()) is not None:
                yield frame
        finally:
            reader.cancel()
            lost = self._registry.close(session)
            if lost and self._state.engine is not None:
                logger.info("proxy %s is gone; aborting its %d requests", session.proxy_id, len(lost))
                await asyncio.shield(self._state.engine.abort(lost))

    async def _greet(
        self, frames: AsyncIterator[pb.ProxyFrame], context: grpc.aio.ServicerContext
    ) -> ProxySession:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await anext(aiter(frames))
        except (TimeoutError, StopAsyncIteration):
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no Hello frame came")
            raise AssertionError("abort raises") from None
        if first.WhichOneof("frame") != "hello" or not first.hello.proxy_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first frame must be Hello")
        if first.hello.protocol_version != PROTOCOL_VERSION:
            text = f"protocol version {first.hello.protocol_version}; this node speaks {PROTOCOL_VERSION}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        if not self._state.ready:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the node is not ready")
        return ProxySession(first.hello.proxy_id)

    async def _read(self, frames: AsyncIterator[pb.ProxyFrame], session: ProxySession) -> None:
        async for frame in frames:
            kind = frame.WhichOneof("frame")
            if kind == "add":
                await self._add(frame.add, session)
            elif kind == "abort":
                await self._abort(list(frame.abort.request_ids), session)
            elif kind == "decode_engines":
                await self._announce(list(frame.decode_engines.engine_ids))
            elif kind == "kv_blocks":
                self._registry.kv_blocks.resend(frame.kv_blocks.rank, session.send)
            else:
                logger.warning("proxy %s sent an unexpected %s frame", session.proxy_id, kind)

    async def _announce(self, engine_ids: list[str]) -> None:
        engine = self._state.engine
        if engine is None or engine.dead:
            return
        try:
            await self._registry.decode_engines.add(engine, engine_ids)
        except (EngineDeadError, TimeoutError) as error:
            # What needs them will fail by itself, and be tried anew.
            logger.error("the engines did not take the decode engines of a proxy: %r", error)

    async def _add(self, add: pb.AddRequest, session: ProxySession) -> None:
        claimed = False
        try:
            engine = self._admitting_engine(add.rank)
            request = codec.decode_request(add.request)
            if request.request_id != add.request_id:
                raise InvalidRequestError("the request inside has another id", param="request_id")
            self._role.check_request(request)
            self._registry.claim(add.request_id, session)
            claimed = True
            await engine.add(request, add.rank)
        except LockstepError as error:
            if claimed:
                self._registry.release([add.request_id], session)
            session.send_error(add.request_id, error)
        except msgspec.MsgspecError as error:
            logger.warning("request %s cannot be decoded: %s", add.request_id, error)
            message = "the request cannot be decoded: are both ends of the same vLLM version?"
            session.send_error(add.request_id, InvalidRequestError(message, param="request"))

    def _admitting_engine(self, rank: int) -> EngineCores:
        engine = self._state.engine
        if self._state.draining:
            raise DrainingError("this node is shutting down")
        if engine is None or engine.dead or not self._state.ready:
            raise UnavailableError("this node is not ready")
        if rank >= engine.num_ranks:
            raise InvalidRequestError(f"rank {rank} of {engine.num_ranks}", param="rank")
        return engine

    async def _abort(self, request_ids: list[str], session: ProxySession) -> None:
        owned = self._registry.release(request_ids, session)
        ended = session.take_finished(request_ids)
        engine = self._state.engine
        if owned and engine is not None:
            await engine.abort(owned)
        if ended and engine is not None:
            await engine.abandon(ended)

    def _description(self) -> pb.NodeDescription:
        description = self._state.description
        if description is None:
            raise AssertionError("a session opens only when the node is ready")
        return description


async def start_server(
    service: NodeService, host: str, port: int, credentials: Credentials = NO_CREDENTIALS
) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
    """Bind and start; raises ConfigError when the port is taken."""
    server = make_server(credentials)
    servicer = health.aio.HealthServicer()
    lockstep_pb2_grpc.add_NodeServicer_to_server(service, server)
    add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection((SERVICE_NAME, reflection.SERVICE_NAME, health.SERVICE_NAME), server)
    await servicer.set(SERVICE_NAME, health_pb2.HealthCheckResponse.NOT_SERVING)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = listen(server, address, credentials)
    except RuntimeError as error:
        raise ConfigError(f"--port: cannot listen on {address}; give a free port") from error
    if bound == 0:
        raise ConfigError(f"--port: cannot listen on {address}; give a free port")
    await server.start()
    return server, servicer
