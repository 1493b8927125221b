"""The node's gRPC service over the wire; only the engine cores, other processes, are stood in for."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason

from kv_transfer.params import new_token, prefill_leg_params
from lockstep.errors import ConfigError
from lockstep.health import bind
from lockstep.node.drain import Drain
from lockstep.node.engine import RankStatus
from lockstep.node.metrics import NodeMetrics
from lockstep.node.server import SERVICE_NAME, NodeService, start_server
from lockstep.node.sessions import SessionRegistry
from lockstep.node.telemetry import Telemetry
from lockstep.rpc import codec
from lockstep.rpc.channel import PROTOCOL_VERSION, connect
from lockstep.rpc.generated import lockstep_pb2 as pb
from lockstep.rpc.generated.lockstep_pb2_grpc import NodeStub
from prefill_node.service import ROLE

HELLO = pb.ProxyFrame(hello=pb.Hello(protocol_version=PROTOCOL_VERSION, proxy_id="p1"))
DEADLINE_S = 20.0
IDLE = RankStatus(0, 0, 0.0, [], 0, {})


class EngineCores:
    """Stands for the engine processes: notes what they are told."""

    num_ranks = 2
    dead = False

    def __init__(self) -> None:
        self.added: list[tuple[str, int]] = []
        self.aborted: list[str] = []
        self.abandoned: list[str] = []
        self.announced: list[list[str]] = []
        self.answers: list[RankStatus] = [IDLE, IDLE]
        self.polls = 0
        self.global_ranks = [0, 1]

    async def status(self) -> list[RankStatus]:
        self.polls += 1
        return self.answers

    async def add(self, request: EngineCoreRequest, local_rank: int) -> None:
        self.added.append((request.request_id, local_rank))

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def abandon(self, request_ids: list[str]) -> None:
        self.abandoned += request_ids

    async def announce(self, engine_ids: list[str]) -> None:
        assert not self.added, "a leg came before the engines that it may need"
        self.announced.append(engine_ids)


class State:
    """A ready node."""

    def __init__(self) -> None:
        self.engine: Any = EngineCores()
        self.description: pb.NodeDescription | None = pb.NodeDescription(instance_id="i1", block_size=128)
        self.ready = True
        self.draining = False
        self.drain = Drain(20.0, SessionRegistry())
        self.metrics = NodeMetrics()
        self.telemetry = Telemetry(self.metrics, SessionRegistry(), counts_steps=True)

    def loads(self) -> list[pb.RankLoad]:
        return [pb.RankLoad(rank=0), pb.RankLoad(rank=1, num_running=3)]

    def status(self) -> pb.NodeStatus | None:
        return None if self.description is None else self.telemetry.status(self.description.instance_id)


class Running:
    """The server under test and ways to talk to it."""

    def __init__(self, state: State, registry: SessionRegistry, channel: grpc.aio.Channel) -> None:
        self.state = state
        self.registry = registry
        self.channel = channel
        self.stub = NodeStub(channel)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[grpc.aio.StreamStreamCall]:
        """A greeted session; leaving it drops the stream as a dying proxy would."""
        call = self.stub.Session(timeout=DEADLINE_S)
        await call.write(HELLO)
        assert (await call.read()).welcome.instance_id == "i1"
        try:
            yield call
        finally:
            call.cancel()


@pytest.fixture
async def node() -> AsyncIterator[Running]:
    state, registry = State(), SessionRegistry()
    with bind("127.0.0.1", 0, "--port") as free:
        port = free.getsockname()[1]
    server, _ = await start_server(NodeService(ROLE, state, registry), "127.0.0.1", port)
    async with connect(f"127.0.0.1:{port}") as channel:
        yield Running(state, registry, channel)
    await server.stop(grace=0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - the condition is about another task's state
            await asyncio.sleep(0.01)


def add(request_id: str, rank: int = 0, **changes: Any) -> pb.ProxyFrame:
    params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": prefill_leg_params(new_token())})
    request = EngineCoreRequest(
        request_id=changes.get("inner_id", request_id),
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=changes.get("params", params),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    encoded = changes.get("encoded", codec.encode_request(request))
    return pb.ProxyFrame(add=pb.AddRequest(request_id=request_id, rank=rank, request=encoded))


def finish(node: Running, request_id: str) -> None:
    output = EngineCoreOutput(request_id, [7], finish_reason=FinishReason.LENGTH)
    node.registry.deliver(EngineCoreOutputs(outputs=[output], timestamp=1.0), pb.RankLoad())


async def test_requests_reach_the_rank_that_was_asked_for(node: Running) -> None:
    async with node.session() as call:
        await call.write(add("a", rank=1))
        await call.write(add("b", rank=0))
        await until(lambda: len(node.state.engine.added) == 2)
    assert node.state.engine.added == [("a", 1), ("b", 0)]


async def test_welcome_tells_the_loads(node: Running) -> None:
    call = node.stub.Session(timeout=DEADLINE_S)
    await call.write(HELLO)
    loads = (await call.read()).welcome.loads
    assert [(load.rank, load.num_running) for load in loads] == [(0, 0), (1, 3)]
    call.cancel()


async def test_a_proxy_that_disappears_has_its_requests_aborted(node: Running) -> None:
    """And only its own: another proxy's request goes on."""
    async with node.session() as other:
        await other.write(add("stays"))
        async with node.session() as call:
            await call.write(add("a"))
            await call.write(add("b", rank=1))
            await until(lambda: len(node.state.engine.added) == 3)
        await until(lambda: len(node.state.engine.aborted) == 2)
        assert sorted(node.state.engine.aborted) == ["a", "b"]
        assert node.registry.num_requests == 1


async def test_a_step_arrives_with_the_engines_own_values(node: Running) -> None:
    """What the engine says of a whole step, time and weights, is not lost when it is split by proxy."""
    async with node.session() as call:
        await call.write(add("a"))
        await until(lambda: node.state.engine.added)
        output = EngineCoreOutput("a", [7], finish_reason=FinishReason.LENGTH)
        node.registry.deliver(
            EngineCoreOutputs(outputs=[output], timestamp=1.0, weight_version="default"), pb.RankLoad()
        )
        while (frame := await call.read()).WhichOneof("frame") != "step":
            pass
    step = codec.decode_outputs(frame.step.outputs)
    assert (step.timestamp, step.weight_version) == (1.0, "default")
    assert [out.new_token_ids for out in step.outputs] == [[7]]


async def test_abort_reaches_the_engine_once(node: Running) -> None:
    async with node.session() as call:
        await call.write(add("a"))
        await call.write(pb.ProxyFrame(abort=pb.AbortRequests(request_ids=["a", "unknown"])))
        await until(lambda: bool(node.state.engine.aborted))
    assert node.state.engine.aborted == ["a"]


async def test_abort_after_the_end_frees_what_prefill_still_holds(node: Running) -> None:
    """A finished prefill leg holds blocks for decode; an abort by its own proxy gives them up."""
    async with node.session() as call, node.session() as stranger:
        await call.write(add("a"))
        await until(lambda: bool(node.state.engine.added))
        finish(node, "a")
        abort = pb.ProxyFrame(abort=pb.AbortRequests(request_ids=["a"]))
        await stranger.write(abort)
        await stranger.write(add("b"))
        await until(lambda: len(node.state.engine.added) == 2)  # the stranger's abort was handled before
        assert node.state.engine.abandoned == []
        await call.write(abort)
        await until(lambda: bool(node.state.engine.abandoned))
    assert node.state.engine.abandoned == ["a"]


PLAIN = SamplingParams(max_tokens=1)


@pytest.mark.parametrize(
    ("frame", "code", "text"),
    [
        (add("x", params=PLAIN), "WrongLegError", "kv_transfer_params"),
        (add("x", rank=2), "InvalidRequestError", "rank 2 of 2"),
        (add("x", inner_id="y"), "InvalidRequestError", "another id"),
        (add("x", encoded=[b"not msgpack"]), "InvalidRequestError", "decoded"),
    ],
)
async def test_bad_requests_are_refused_and_the_session_goes_on(
    node: Running, frame: pb.ProxyFrame, code: str, text: str
) -> None:
    async with node.session() as call:
        await call.write(frame)
        answer = await call.read()
        assert (answer.error.request_id, answer.error.code) == ("x", code)
        assert text in answer.error.message
        await call.write(add("good"))
        await until(lambda: node.state.engine.added == [("good", 0)])


async def test_an_id_in_use_is_refused(node: Running) -> None:
    async with node.session() as call:
        await call.write(add("a"))
        await call.write(add("a"))
        assert "in use" in (await call.read()).error.message
    assert node.state.engine.added == [("a", 0)]


async def test_a_draining_node_refuses_and_finishes_what_it_has(node: Running) -> None:
    async with node.session() as call:
        await call.write(add("a"))
        await until(lambda: bool(node.state.engine.added))
        node.state.draining = True
        await call.write(add("b"))
        assert (await call.read()).error.code == "DrainingError"
        finish(node, "a")
        step = await call.read()
        assert codec.decode_outputs(step.step.outputs).outputs[0].request_id == "a"


@pytest.mark.parametrize(
    ("prepare", "first", "status"),
    [
        (lambda state: None, add("a"), grpc.StatusCode.INVALID_ARGUMENT),
        (
            lambda state: None,
            pb.ProxyFrame(hello=pb.Hello(protocol_version=PROTOCOL_VERSION + 1, proxy_id="p")),
            grpc.StatusCode.FAILED_PRECONDITION,
        ),
        (lambda state: setattr(state, "ready", False), HELLO, grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_sessions_that_cannot_be_are_refused(
    node: Running, prepare: Callable[[State], Awaitable[None] | None], first: pb.ProxyFrame, status: Any
) -> None:
    """No Hello first, another protocol version, a node that is not ready."""
    prepare(node.state)
    call = node.stub.Session(timeout=DEADLINE_S)
    await call.write(first)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert raised.value.code() == status


async def test_describe_answers_before_ready_and_says_so(node: Running) -> None:
    node.state.ready = False
    answer = await node.stub.Describe(pb.DescribeRequest(), timeout=DEADLINE_S)
    assert (answer.block_size, answer.ready) == (128, False)
    node.state.description = None
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await node.stub.Describe(pb.DescribeRequest(), timeout=DEADLINE_S)
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_status_tells_what_was_read_of_the_engines(node: Running) -> None:
    """Totals by rank; asking again counts nothing twice, and no engine core is asked."""
    step = [0, "NONE", 1, 1, 1, 1, False, "short_row"]
    node.state.engine.answers = [RankStatus(1, 2, 0.5, [step], 0, {"pushed_bytes": 640}), IDLE]
    await node.state.telemetry.poll(node.state.engine)
    for _ in range(2):
        status = await node.stub.Status(pb.StatusRequest(), timeout=DEADLINE_S)
    assert node.state.engine.polls == 1
    assert status.instance_id == "i1"
    assert [rank.global_rank for rank in status.ranks] == [0, 1]
    busy = status.ranks[0]
    assert (busy.load.num_running, busy.load.num_waiting, busy.load.kv_cache_usage) == (1, 2, 0.5)
    assert list(busy.steps) == [pb.StepCount(mode="NONE", cause="short_row", origin="own", count=1)]
    assert busy.kv.pushed_bytes == 640
    assert not status.ranks[1].steps


async def test_status_is_unavailable_while_the_engines_start(node: Running) -> None:
    """As Describe is."""
    node.state.description = None
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await node.stub.Status(pb.StatusRequest(), timeout=DEADLINE_S)
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_health_and_reflection_are_served(node: Running) -> None:
    """What grpcurl and Kubernetes ask."""
    health = health_pb2_grpc.HealthStub(node.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=DEADLINE_S)
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    stub = reflection_pb2_grpc.ServerReflectionStub(node.channel)
    call = stub.ServerReflectionInfo(timeout=DEADLINE_S)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    services = (await call.read()).list_services_response.service
    assert SERVICE_NAME in {service.name for service in services}
    call.cancel()


async def test_a_busy_port_names_its_flag(node: Running) -> None:
    with bind("127.0.0.1", 0, "--port") as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="--port"):
            await start_server(
                NodeService(ROLE, State(), SessionRegistry()), "127.0.0.1", taken.getsockname()[1]
            )


async def announce(session: grpc.aio.StreamStreamCall, *engine_ids: str) -> None:
    await session.write(pb.ProxyFrame(decode_engines=pb.DecodeEngines(engine_ids=engine_ids)))


async def test_decode_engines_are_told_before_the_legs_that_need_them(node: Running) -> None:
    """All that any proxy has named, once there is a new one; they stay when its session ends."""
    cores: EngineCores = node.state.engine
    async with node.session() as session:
        await announce(session, "d0", "d1")
        await announce(session, "d1", "d0")
        await session.write(add("r1"))
        await until(lambda: cores.added == [("r1", 0)])
    assert cores.announced == [["d0", "d1"]]
    cores.added.clear()
    async with node.session() as session:
        await announce(session, "d1", "d2")
        await until(lambda: len(cores.announced) == 2)
    assert cores.announced[1] == ["d0", "d1", "d2"]
