"""The two-leg flow: sends each request to both sides, joins what comes back, and ends both on any end."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from kv_transfer.params import PrefillPeer, new_token
from lockstep import logs
from lockstep.errors import DeadlineError, DrainingError, LockstepError, NodeLostError
from lockstep.rpc import codec
from lockstep.rpc.generated import lockstep_pb2 as pb
from proxy import http_errors, legs
from proxy.cluster import Cluster
from proxy.flight import Flight, Phase
from proxy.metrics import AttemptReason, ProxyMetrics
from proxy.nodes import Node
from proxy.routing import RankLoad, Ranks, decode_ranks
from proxy.session import NodeSession
from proxy.window_queue import WindowQueue

logger = logging.getLogger(__name__)

FailRequest = Callable[[str, LockstepError], Iterable[str]]
"""Delivers an error to the client's request; returns the internal ids of all its choices."""


class Flow:
    """All requests in flight, and the events of all sessions. Everything happens on one event loop."""

    def __init__(self, cluster: Cluster, ranks: Ranks, request_timeout_s: float) -> None:
        self._cluster = cluster
        self._ranks = ranks
        self.metrics = ProxyMetrics()
        self._request_timeout_s = request_timeout_s
        self._sessions: dict[str, NodeSession] = {}
        self._flights: dict[str, Flight] = {}
        self._by_leg: dict[str, Flight] = {}
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._queue: WindowQueue[Flight] = WindowQueue(self._send, self._fail)
        self._idle = asyncio.Event()
        self._idle.set()
        self._fail_request: FailRequest = lambda front_id, error: ()
        self.outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        """For the front end, in its own ids and clock."""
        self.draining = False
        self.paired = asyncio.Event()
        """Set once a prefill and a decode node that fit together are live."""

    @property
    def cluster(self) -> Cluster:
        """To be read."""
        return self._cluster

    @property
    def ranks(self) -> Ranks:
        """To be read."""
        return self._ranks

    def session(self, address: str) -> NodeSession | None:
        """The open session with a node, if there is one."""
        return self._sessions.get(address)

    def bind(self, fail_request: FailRequest) -> None:
        """Connect the way back for errors; called once, by the front end."""
        self._fail_request = fail_request

    def not_ready_because(self) -> str:
        """Empty when requests are taken."""
        return "draining" if self.draining else self._cluster.not_ready_because()

    @property
    def num_decode_ranks(self) -> int:
        """Decode ranks of the served key, those that are away for now too."""
        return len(decode_ranks(self._cluster.known("decode")))

    @property
    def num_queued(self) -> int:
        """Requests that wait here for a prefill rank below its window."""
        return len(self._queue)

    @property
    def num_in_flight(self) -> int:
        """Requests that were started and have not ended, those that wait included."""
        return len(self._flights)

    def start(self, flight: Flight) -> None:
        """Queue a request; whatever goes wrong with it from now on reaches it through `fail_request`."""
        self._flights[flight.front_id] = flight
        self._idle.clear()
        self._deadlines[flight.front_id] = asyncio.get_running_loop().call_later(
            self._request_timeout_s, self._expire, flight
        )
        self._queue.put(flight)

    def abort(self, front_ids: Iterable[str], outcome: str) -> None:
        """End requests that the front end no longer wants; unknown ids are those that ended meanwhile."""
        for front_id in front_ids:
            flight = self._flights.get(front_id)
            if flight is not None:
                self._end(flight, outcome, abort=True)

    # What the sessions call.

    def node_up(self, session: NodeSession, node: Node, loads: Sequence[pb.RankLoad]) -> None:
        self._sessions[node.address] = session
        self._ranks.add(node)
        for load in loads:
            self._ranks.report(node.address, load.rank, load.num_running, load.num_waiting)
        self._cluster.up(node)
        if self._cluster.pair():
            self.paired.set()
        self._queue.pump()

    def node_down(self, address: str, reason: str) -> None:
        self._sessions.pop(address, None)
        self._cluster.down(address, reason)
        self._ranks.remove(address)
        for flight in list(self._flights.values()):
            if _needs(flight, address):
                self._fail(flight, NodeLostError("A node that held the request went away."))
        self._queue.pump()

    def frame(self, address: str, frame: pb.NodeFrame) -> None:
        kind = frame.WhichOneof("frame")
        if kind == "step":
            self._step(address, frame.step)
        elif kind == "load":
            self._load(address, frame.load)
        elif kind == "error":
            self._error(address, frame.error)
        elif kind == "draining":
            self._cluster.down(address, "draining")
            self._queue.pump()

    # Ending the service.

    async def drain(self, deadline_s: float) -> None:
        """Let running requests end; fail those that have not by the deadline, queued ones at once."""
        self.draining = True
        refused = DrainingError("The service is shutting down.")
        for flight in list(self._flights.values()):
            if flight.phase is Phase.QUEUED:
                self._fail(flight, refused)
        try:
            await asyncio.wait_for(self._idle.wait(), deadline_s)
        except TimeoutError:
            logger.warning("%d requests did not end in time and are aborted", len(self._flights))
        for flight in list(self._flights.values()):
            self._fail(flight, refused)

    # The flow.

    def _send(self, flight: Flight) -> bool:
        """Start both legs at once, or return False while no prefill rank is below its window."""
        prefill = self._ranks.pick_prefill(self._cluster.live("prefill"))
        wanted = flight.request.data_parallel_rank
        if wanted is None:
            decode = self._ranks.pick_decode(self._cluster.live("decode"))
        else:
            decode = self._ranks.decode_at(self._cluster.known("decode"), wanted)
        if prefill is None:
            return False
        token = new_token()
        peer = PrefillPeer(
            engine_id=prefill.rank.engine_id,
            side_channel_host=prefill.rank.side_channel_host,
            side_channel_port=prefill.rank.side_channel_port,
            tp_size=prefill.rank.tensor_parallel_size,
        )
        self._by_leg[flight.leg_id] = flight
        flight.dispatched(prefill, decode)
        self.metrics.attempted(AttemptReason.FIRST)
        for load, leg in (
            (prefill, legs.prefill_leg(flight.request, flight.leg_id, token)),
            (decode, legs.decode_leg(flight.request, flight.leg_id, peer, token)),
        ):
            load.begin(flight.prompt_tokens)
            self._sessions[load.node.address].add(
                flight.leg_id, load.rank.local_rank, codec.encode_request(leg)
            )
        return True

    def _step(self, address: str, step: pb.StepOutputs) -> None:
        outputs = codec.decode_outputs(step.outputs)
        now = time.monotonic()
        clock_offset_s = now - outputs.timestamp
        if step.HasField("load"):
            self._load(address, step.load)
        passed_on: list[EngineCoreOutput] = []
        for output in outputs.outputs:
            flight = self._by_leg.get(output.request_id)
            if flight is None:
                continue  # ended here already; its abort is on the way
            try:
                passed_on += self._take(flight, address, output, clock_offset_s)
            except LockstepError as error:
                self._fail(flight, error)
        if passed_on:
            self.outputs.put_nowait(
                EngineCoreOutputs(outputs=passed_on, timestamp=now, weight_version=outputs.weight_version)
            )
        self._queue.pump()

    def _take(
        self, flight: Flight, address: str, output: EngineCoreOutput, clock_offset_s: float
    ) -> list[EngineCoreOutput]:
        waited = flight.phase is not Phase.STREAMING
        if _is_at(flight.prefill, address):
            outputs = flight.on_prefill(output, clock_offset_s)
            if flight.phase is not Phase.DISPATCHED:
                self._release_prefill(flight)
        else:
            outputs = flight.on_decode(output, clock_offset_s)
        if outputs and waited:
            self.metrics.first_token(flight.first_token_s - flight.arrived_s)
        if outputs and outputs[-1].finish_reason is not None:
            self._end(flight, str(outputs[-1].finish_reason), abort=False)
        return outputs

    def _load(self, address: str, load: pb.RankLoad) -> None:
        self._ranks.report(address, load.rank, load.num_running, load.num_waiting)

    def _error(self, address: str, error: pb.RequestError) -> None:
        flight = self._by_leg.get(error.request_id)
        if flight is not None:
            logger.warning("node %s refused a leg: %s: %s", address, error.code, error.message)
            self._fail(flight, http_errors.from_node(error.code, error.message))

    def _expire(self, flight: Flight) -> None:
        self._fail(flight, DeadlineError("The request did not finish in its time."))

    def _fail(self, flight: Flight, error: LockstepError) -> None:
        """End a request with an error, its other choices with it (one client request is one answer)."""
        if self._flights.get(flight.front_id) is not flight:
            return
        self._end(flight, type(error).__name__, abort=True)
        for front_id in self._fail_request(flight.front_id, error):
            sibling = self._flights.get(front_id)
            if sibling is not None:
                self._end(sibling, type(error).__name__, abort=True)

    def _end(self, flight: Flight, outcome: str, abort: bool) -> None:
        """Forget a request; with `abort`, both nodes are told, whichever legs they still have.

        Prefill is told even after its leg ended: it may still hold the blocks for a push.
        """
        del self._flights[flight.front_id]
        self._deadlines.pop(flight.front_id).cancel()
        self._queue.discard(flight)
        if flight.prefill is not None and flight.decode is not None:
            del self._by_leg[flight.leg_id]
            self._release_prefill(flight)
            flight.decode.end(flight.prompt_tokens)
            if abort:
                for load in (flight.prefill, flight.decode):
                    session = self._sessions.get(load.node.address)
                    if session is not None:
                        session.abort([flight.leg_id])
        if not self._flights:
            self._idle.set()
        self.metrics.ended(outcome)
        _log(flight, outcome)
        self._queue.pump()

    def _release_prefill(self, flight: Flight) -> None:
        if flight.prefill is not None and not flight.prefill_released:
            flight.prefill_released = True
            flight.prefill.end(flight.prompt_tokens)


def _is_at(load: RankLoad | None, address: str) -> bool:
    return load is not None and load.node.address == address


def _needs(flight: Flight, address: str) -> bool:
    """Prefill is needed until decode's first token shows that the KV has arrived."""
    return _is_at(flight.decode, address) or (
        flight.phase is not Phase.STREAMING and _is_at(flight.prefill, address)
    )


def _log(flight: Flight, outcome: str) -> None:
    bound = logs.request_id.set(flight.request_id)
    ranks = (
        f"prefill={flight.prefill.node.address}/{flight.prefill.rank.local_rank} "
        f"decode={flight.decode.node.address}/{flight.decode.rank.local_rank}"
        if flight.prefill and flight.decode
        else "prefill=- decode=-"
    )
    logger.info(
        "%s: %s, prompt_tokens=%d output_tokens=%d %s %s",
        flight.leg_id,
        outcome,
        flight.prompt_tokens,
        flight.output_tokens,
        flight.timings(),
        ranks,
    )
    logs.request_id.reset(bound)
