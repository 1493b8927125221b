"""The two-leg flow: what the front end starts and aborts, and what the sessions report, joined."""

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Sequence

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from lockstep.errors import DrainingError, LockstepError, NodeLostError
from lockstep.rpc import codec
from lockstep.rpc.generated import lockstep_pb2 as pb
from proxy import http_errors
from proxy.admission.queue_limits import QueueLimits
from proxy.announcements import Announcements
from proxy.attempt import Attempt, Phase
from proxy.cluster import Cluster
from proxy.dispatch import Dispatcher
from proxy.flight import Flight
from proxy.in_flight import InFlight
from proxy.live.journal import Journal
from proxy.live.lanes import Lanes
from proxy.metrics import HandOffOutcome, ProxyMetrics
from proxy.moves import DrainMoves
from proxy.nodes import Node, Role
from proxy.outlet import Outlet
from proxy.retries.limits import RetryLimits
from proxy.retries.rules import RetryRules
from proxy.routing import Ranks, decode_ranks
from proxy.served import Served
from proxy.session import NodeSession
from proxy.suspicion import Suspicion

logger = logging.getLogger(__name__)

_DEFAULT_QUEUE_LIMITS = QueueLimits()
_DEFAULT_RETRY_LIMITS = RetryLimits()


class Flow:
    """All requests in flight, and the events of all sessions. Everything happens on one event loop."""

    def __init__(
        self,
        cluster: Cluster,
        ranks: Ranks,
        request_timeout_s: float,
        max_attempts: int,
        *,
        hand_off: bool = True,
        queue_limits: QueueLimits = _DEFAULT_QUEUE_LIMITS,
        frozen_after_s: float = 5.0,
        retry_limits: RetryLimits = _DEFAULT_RETRY_LIMITS,
        drain_move_s: float = 5.0,
    ) -> None:
        self._cluster = cluster
        self._ranks = ranks
        self.metrics = ProxyMetrics()
        self._dispatcher = Dispatcher(
            cluster, ranks, self.metrics, hand_off=hand_off, retry_limits=retry_limits
        )
        self._announcements = Announcements()
        self.journal = Journal()
        self.lanes = Lanes()
        """This and the journal are for those who watch."""
        self._in_flight = InFlight(
            self._dispatcher,
            self.metrics,
            self.journal,
            request_timeout_s,
            max_attempts,
            queue_limits,
            RetryRules(retry_limits, self.metrics),
        )
        self._drain_moves = DrainMoves(cluster, self._in_flight, drain_move_s)
        self.suspicion = Suspicion(cluster, self._in_flight, frozen_after_s)
        self.request_timeout_s = request_timeout_s
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
        return self._dispatcher.session(address)

    def not_ready_because(self) -> str:
        """Empty when requests are taken."""
        return "draining" if self.draining else self._cluster.not_ready_because()

    @property
    def num_decode_ranks(self) -> int:
        """Decode ranks of what is served, those that are away for now too."""
        return len(decode_ranks(self._cluster.known("decode")))

    @property
    def num_queued(self) -> int:
        """Requests that wait here for a prefill rank below its window."""
        return self._in_flight.num_queued

    def make_room(self, choices: int, priority: int) -> None:
        """For a request that is about to start; raises OverloadedError when too many wait already."""
        self._in_flight.make_room(choices, priority)

    def retry_after_s(self) -> int:
        """When a client that is refused now may well come back."""
        return self._in_flight.retry_after_s()

    @property
    def num_in_flight(self) -> int:
        """Requests that were started and have not ended, those that wait included."""
        return len(self._in_flight)

    def in_flight(self) -> Iterator[Flight]:
        """These, in the order in which they came; to be read, and none may end meanwhile."""
        return iter(self._in_flight)

    def start(self, flight: Flight) -> None:
        """Queue a request; whatever goes wrong with it from now on reaches it through its outlet."""
        self._in_flight.start(flight)

    def abort(self, front_ids: Iterable[str], outcome: str) -> None:
        """End requests that the front end no longer wants; unknown ids are those that ended meanwhile."""
        for front_id in front_ids:
            flight = self._in_flight.get(front_id)
            if flight is not None:
                self._in_flight.end(flight, outcome, abort=True)

    async def drain(self, deadline_s: float) -> None:
        """Let running requests end; fail those that have not by the deadline, unsent ones at once."""
        self.draining = True
        refused = DrainingError("The service is shutting down.")
        for flight in self._in_flight.all():
            if not flight.attempts:
                self._in_flight.fail(flight, refused)
        try:
            await asyncio.wait_for(self._in_flight.empty.wait(), deadline_s)
        except TimeoutError:
            logger.warning("%d requests did not end in time and are aborted", len(self._in_flight))
        for flight in self._in_flight.all():
            self._in_flight.fail(flight, refused)

    def succeed(self, served: Served) -> None:
        """Another front end has begun to answer."""
        self._cluster.succeed(served)
        self._in_flight.pump()

    # What the membership calls.

    def join(self, address: str, role: Role) -> None:
        self._cluster.join(address, role)
        self._in_flight.pump()

    def leave(self, address: str) -> None:
        self._cluster.leave(address)

    def is_used(self, address: str) -> bool:
        """Prefill is needed until its KV has arrived."""
        for flight in self._in_flight:
            for attempt in flight.live():
                role = attempt.role_at(address)
                if role is not None and attempt.needs(role):
                    return True
        return False

    def forget(self, address: str) -> None:
        self.node_down(address, "no longer listed")
        self._cluster.forget(address)
        self.lanes.forget(address)
        self._dispatcher.forget(address)

    # What the sessions call.

    def node_up(self, session: NodeSession, node: Node, loads: Sequence[pb.RankLoad]) -> None:
        self._dispatcher.opened(session, node)
        self._drain_moves.gone(node.address)
        self._announcements.opened(session, node)
        self._ranks.add(node)
        self.lanes.opened(node)
        self.suspicion.steps.opened(node, time.monotonic())
        for load in loads:
            self._load(node.address, load)
        self._cluster.up(node)
        if self._cluster.pair():
            self.paired.set()
        self._in_flight.pump()

    def node_down(self, address: str, reason: str) -> None:
        self._dispatcher.closed(address)
        self._drain_moves.gone(address)
        self._announcements.closed(address)
        # The ranks of a group step together: the other nodes of it can do nothing without this one.
        lost = self._cluster.group(address)
        self._cluster.down(address, reason)
        self._ranks.remove(address)
        self.suspicion.steps.closed(address)
        for flight in self._in_flight.all():
            for attempt in flight.live():
                for role in {attempt.role_at(member) for member in lost}:
                    if role is not None:
                        attempt.on_loss(role)
            self._in_flight.try_again(flight)
        self._in_flight.pump()

    def frame(self, address: str, frame: pb.NodeFrame) -> None:
        kind = frame.WhichOneof("frame")
        if kind == "step":
            self._step(address, frame.step)
        elif kind == "load":
            self._load(address, frame.load)
        elif kind == "records":
            self.lanes.add(address, frame.records)
            self.suspicion.steps.stepped(address, frame.records.rank, time.monotonic())
        elif kind == "error":
            self._error(address, frame.error)
        elif kind == "kv_blocks":
            session = self._dispatcher.session(address)
            if not self._ranks.kv_blocks(address, frame.kv_blocks) and session is not None:
                session.ask_kv_blocks(frame.kv_blocks.rank)
        elif kind == "draining":
            self._cluster.down(address, "draining")
            self._drain_moves.draining(address, frame.draining)
        self._in_flight.pump()

    def _step(self, address: str, step: pb.StepOutputs) -> None:
        outputs = codec.decode_outputs(step.outputs)
        now = time.monotonic()
        clock_offset_s = now - outputs.timestamp
        self.suspicion.steps.stepped(address, step.rank, now)
        if step.HasField("load"):
            self._load(address, step.load)
        passed_on: dict[Outlet, list[EngineCoreOutput]] = {}
        for output in outputs.outputs:
            # An id that is not live: its attempt ended here already, and its abort is on the way.
            flight = self._dispatcher.flight(output.request_id)
            attempt = flight.live_at(output.request_id) if flight else None
            role = attempt.role_at(address) if attempt else None
            if flight is None or attempt is None or role is None:
                continue
            try:
                taken = self._take(flight, attempt, role, output, clock_offset_s)
                if taken:
                    passed_on.setdefault(flight.outlet, []).extend(taken)
            except LockstepError as error:
                logger.warning("%s failed at %s: %s", output.request_id, address, error)
                self._in_flight.fail(flight, error)
        for outlet, mine in passed_on.items():
            outlet.outputs.put_nowait(
                EngineCoreOutputs(outputs=mine, timestamp=now, weight_version=outputs.weight_version)
            )

    def _take(
        self, flight: Flight, attempt: Attempt, role: Role, output: EngineCoreOutput, clock_offset_s: float
    ) -> list[EngineCoreOutput]:
        had_none, stalled_s = not flight.first_token_s, flight.stalled_s
        phase, waited = attempt.phase, not attempt.first_output_s
        outputs = flight.on_output(role, output, clock_offset_s, attempt)
        if flight.hedge is not None:
            self._dispatcher.decide(flight)
        if attempt.end is not None:
            self._in_flight.try_again(flight)
        elif attempt.phase is not Phase.DISPATCHED:
            self._dispatcher.came_further(attempt)
        if attempt.phase is not phase:
            self.journal.changed(flight)
        if outputs and waited and attempt.hand_off:
            self.metrics.first_token_of(HandOffOutcome.PASSED_ON, early=attempt.phase is Phase.SAMPLED)
        if outputs and had_none:
            self.metrics.first_token(flight.first_token_s - flight.arrived_s)
        if outputs and stalled_s is not None:
            self.metrics.resumed(attempt.first_output_s - stalled_s)
            flight.stalled_s = None
        if outputs and outputs[-1].finish_reason is not None:
            self._in_flight.end(flight, str(outputs[-1].finish_reason), abort=attempt.hand_off_ended)
        return outputs

    def _load(self, address: str, load: pb.RankLoad) -> None:
        self._ranks.report(address, load.rank, load.num_running, load.num_waiting, load.kv_cache_usage)
        self.suspicion.steps.reported(address, load.rank, load.num_running, time.monotonic())

    def _error(self, address: str, error: pb.RequestError) -> None:
        flight = self._dispatcher.flight(error.request_id)
        attempt = flight.live_at(error.request_id) if flight else None
        role = attempt.role_at(address) if attempt else None
        if flight is None or attempt is None or role is None:
            return
        answer = http_errors.from_node(error.code, error.message)
        if isinstance(answer, DrainingError | NodeLostError):
            # It will refuse all others too, until it has restarted and opens a new session.
            self._cluster.down(address, "draining" if isinstance(answer, DrainingError) else "it failed")
        try:
            attempt.on_error(role, answer)
            self._in_flight.try_again(flight)
        except LockstepError as fatal:
            logger.warning("%s refused by %s: %s: %s", attempt.leg_id, address, error.code, error.message)
            self._in_flight.fail(flight, fatal)
