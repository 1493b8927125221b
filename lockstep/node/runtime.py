"""The life of a node process: bind, start the engines, warm up, serve, drain, stop."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Sequence

import psutil
from grpc_health.v1 import health_pb2
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.exceptions import EngineDeadError

from lockstep import exposure, health, logs
from lockstep.errors import ConfigError, LockstepError, NodeLostError, UnavailableError
from lockstep.node import arguments, ipc_folder
from lockstep.node.config import NodeConfig
from lockstep.node.describe import describe
from lockstep.node.drain import Drain
from lockstep.node.engine import kill_survivors
from lockstep.node.engine_cores import EngineCores, StartCores, start_engine
from lockstep.node.kv_events.blocks import TellsKVEvents
from lockstep.node.metrics import NodeMetrics
from lockstep.node.quarantine import QuarantineWatch
from lockstep.node.role import Role
from lockstep.node.server import SERVICE_NAME, NodeService, start_server
from lockstep.node.sessions import SessionRegistry
from lockstep.node.telemetry import Telemetry
from lockstep.node.warmup import warm_up
from lockstep.rpc import credentials
from lockstep.rpc.generated import lockstep_pb2 as pb

logger = logging.getLogger(__name__)


class StartInterruptedError(Exception):
    """A signal came while vLLM was starting the engine cores, in a thread that nothing can cancel."""


class Node:
    """One node process; implements lockstep.node.server.NodeState."""

    def __init__(self, role: Role, config: NodeConfig, start_cores: StartCores = start_engine) -> None:
        self.role = role
        self.config = config
        self._start_cores = start_cores
        self._credentials = credentials.of_node(config)
        exposure.check(
            config.host,
            "--host",
            guarded=self._credentials.checks_callers,
            insecure_bind=config.insecure_bind,
            needs="--grpc-token-file or --grpc-tls-ca-file with a certificate",
        )
        self.metrics = NodeMetrics()
        self.registry = SessionRegistry()
        self.quarantine = QuarantineWatch(config.quarantine_limit_ratio)
        self.telemetry = Telemetry(
            self.metrics, self.registry, counts_steps=role.name == "decode", quarantine=self.quarantine
        )
        self.engine: EngineCores | None = None
        self.description: pb.NodeDescription | None = None
        self.ready = False
        self.draining = False
        self.drain = Drain(config.drain_timeout_s, self.registry)
        self._phase = "loading the configuration"

    def loads(self) -> list[pb.RankLoad]:
        return self.telemetry.loads()

    def status(self) -> pb.NodeStatus | None:
        if self.description is None:
            return None
        return self.telemetry.status(self.description.instance_id)

    def not_ready_because(self) -> str:
        return "" if self.ready else self._phase

    async def run(self, args: AsyncEngineArgs) -> None:
        """Serve until SIGTERM or SIGINT, or until asked to drain.

        Raises ConfigError, InternalError, EngineDeadError, or UnavailableError where only a new start helps.
        """
        http = health.bind(self.config.host, self.config.http_port, "--http-port")
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.drain.ask)
        web = asyncio.create_task(
            health.serve(health.build_app(self.not_ready_because, self.metrics.registry), http, stopped),
            name="health",
        )
        try:
            await self._start_and_serve(args, self.drain.requested)
        except StartInterruptedError:
            logger.info("stopped while the engines were starting")
            kill_survivors(psutil.Process().children(recursive=True), grace_s=0)
            ipc_folder.remove()
            os._exit(0)
        finally:
            self.ready = False
            self._phase = "stopping"
            if self.engine is not None:
                await self.engine.shutdown()
            stopped.set()
            await web

    async def _start_and_serve(self, args: AsyncEngineArgs, stop: asyncio.Event) -> None:
        service = NodeService(self.role, self, self.registry)
        server, grpc_health = await start_server(
            service, self.config.host, self.config.port, self._credentials
        )
        try:
            start = asyncio.create_task(self._start_engine(args), name="start")
            if not await _first(start, stop):
                raise StartInterruptedError()
            engine = start.result()
            pump = asyncio.create_task(self._pump(engine), name="outputs")
            watch = asyncio.create_task(self.telemetry.run(engine), name="telemetry")
            events = asyncio.create_task(self._follow_kv_events(engine), name="KV events")
            self.ready = True
            await grpc_health.set(SERVICE_NAME, health_pb2.HealthCheckResponse.SERVING)
            logger.info("ready: %d rank(s), gRPC on port %d", engine.num_ranks, self.config.port)
            try:
                await _first(pump, stop, watch)
                await grpc_health.set(SERVICE_NAME, health_pb2.HealthCheckResponse.NOT_SERVING)
                # Not after the drain: where it was asked for, engines that end meanwhile are no error.
                start_anew = watch.result() if watch.done() else ""
                if start_anew:
                    logger.error("draining, to be started anew: %s", start_anew)
                await self._drain(pump)
                if start_anew:
                    raise UnavailableError(start_anew)
            finally:
                for task in (pump, watch, events):
                    task.cancel()
        finally:
            self.drain.finish()
            await server.stop(grace=1.0)

    async def _start_engine(self, args: AsyncEngineArgs) -> EngineCores:
        self._phase = "starting the engines"
        vllm_config = arguments.create_vllm_config(self.role, self.config, args)
        self.engine = engine = await self._start_cores(self.config, vllm_config)
        facts = await engine.facts()
        self.quarantine.set_pools([of_rank.num_kv_blocks for of_rank in facts])
        for of_rank in facts:
            self.role.check_engine(vllm_config, of_rank)
        self._phase = "warming up"
        await warm_up(engine, self.role.warmup_prompt_tokens, self.config.warmup_timeout_s)
        if self.role.name == "prefill":
            await self.registry.decode_engines.limit(engine)
        await self.telemetry.skip(engine)
        await self.telemetry.poll(engine)
        self.description = describe(self.role, self.config, vllm_config, facts, engine.global_ranks)
        return engine

    async def _follow_kv_events(self, engine: EngineCores) -> None:
        if self.role.tells_kv_events(self.config) and isinstance(engine, TellsKVEvents):
            await self.registry.kv_blocks.follow(engine, self.registry.broadcast)

    async def _pump(self, engine: EngineCores) -> None:
        """Hand every engine step to its proxies; ends only with EngineDeadError."""
        try:
            while True:
                outputs = await engine.next_outputs()
                self.registry.deliver(outputs, self.telemetry.observe(outputs))
        except EngineDeadError:
            self.ready = False
            logger.error("an engine core died: the whole group has failed")
            self.registry.fail_all(NodeLostError("the node that held the request went away"))
            raise

    async def _drain(self, pump: "asyncio.Task[None]") -> None:
        """Take no new requests, and let those that run finish until the deadline."""
        self.ready = False
        if pump.done():
            pump.result()  # raises what ended it
        self.draining = True
        self._phase = "draining"
        await self.drain.run(pump, self._still_needed_for)

    def _still_needed_for(self, since_s: float) -> str:
        """What the node must not exit before, though no request has run on it since then."""
        if self.role.name == "prefill" and self.telemetry.holds_kv(since_s):
            return "pushes of KV"
        engine = self.engine
        # The ranks of a group step together, so requests of the others need this node to go on.
        if engine is not None and engine.has_peers_elsewhere and self.telemetry.steps(since_s):
            return "requests on other nodes of its group"
        return ""


async def _first(task: "asyncio.Task[object]", stop: asyncio.Event, *others: "asyncio.Task[object]") -> bool:
    """Wait for a task or for `stop`; True when a task was first. A failed task raises here."""
    stopping = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait({task, stopping, *others}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    for finished in done - {stopping}:
        if finished is not task:
            finished.result()
    return task in done


def main(role: Role, argv: Sequence[str], start_cores: StartCores = start_engine) -> int:
    """Run a node to its end; the exit status is 0 after a signal, 2 for a bad configuration, else 1."""
    try:
        config, args = arguments.load(role, argv)
        logs.configure(config.log_format, config.log_level, role.name)
        logger.info("configuration: %s", config.masked())
        asyncio.run(Node(role, config, start_cores).run(args))
    except ConfigError as error:
        _say(role, f"error: {error}")
        return 2
    except (LockstepError, EngineDeadError, RuntimeError, TimeoutError) as error:
        logger.exception("the node failed")
        _say(role, f"error: {error}")
        return 1
    finally:
        ipc_folder.remove()
    return 0


def _say(role: Role, text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(2, f"lockstep {role.name}: {text}\n".encode())
