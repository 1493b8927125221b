"""Two ranks that step together, their clients, and what has to hold after each step and at the end."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from simulator.client import Client
from simulator.engine import Engine
from simulator.workload import Simulation
from vllm.v1.engine import FinishReason

from decode_node.scheduler.rows import Violation

STALL_STEPS = 300
"""Far more steps than any wait of a simulation can last (receiver.DEADLINE_STEPS)."""

_EMPTY_AT_THE_END = (
    "requests",
    "running",
    "waiting",
    "kv_holding_waiting",
    "deferred_waiting",
    "deferred_frees",
    "finished_recving_kv_req_ids",
    "failed_recving_kv_req_ids",
    "_inflight_prefills",
)


@dataclass(frozen=True, slots=True)
class Result:
    """What one simulation came to.

    Attributes:
        num_steps: of both ranks, without the dummy steps of an idle one.
        violations: rows that were not 1 + K wide, by cause.
    """

    num_steps: int
    clients: list[Client]
    violations: Counter[Violation]
    counters: list[dict[str, Any]]


class Group:
    """Drives one simulation; `checks_width` off for a scheduler that is expected to break the rule."""

    def __init__(self, simulation: Simulation, *, checks_width: bool = True) -> None:
        self.shape = simulation.shape
        self.engines = [Engine(self.shape, rank) for rank in range(2)]
        self.clients = [Client(ask, f"c{index}", self.shape) for index, ask in enumerate(simulation.asks)]
        self._resets = simulation.resets
        self._checks_width = checks_width
        self._by_request: dict[str, Client] = {}
        self._left: set[str] = set()
        self._finished: Counter[str] = Counter()

    def run(self) -> Result:
        now = quiet = 0
        while quiet < STALL_STEPS:
            moved = self._admit(now)
            for engine in self.engines:
                for client_index, outputs in engine.step(now).items():
                    moved |= self._take(client_index, outputs, now)
            if self._checks_width:
                self._check_same_graph()
            now += 1
            quiet = 0 if moved else quiet + 1
            if self._is_over(now):
                self._check_end()
                return self._result()
        raise AssertionError(f"nothing happened for {STALL_STEPS} steps: {self._open()}")

    def _admit(self, now: int) -> bool:
        """Arrivals, next attempts, compiled grammars and aborts that are due."""
        moved = False
        for at, rank in self._resets:
            if at == now:
                self.engines[rank].reset_prefix_cache()
        for client in self.clients:
            if client.submit_at is not None and client.submit_at <= now and not client.is_done:
                request = client.make_request(now)
                self._by_request[request.request_id] = client
                self.engines[client.rank].add(request, client.conversation, client.push)
                moved = True
            if client.grammar_at is not None and client.grammar_at <= now:
                client.compile_grammar()
            if client.ask.abort_at == now and not client.is_done:
                if client.request is not None:
                    self.engines[client.rank].abort(client.request.request_id, late=client.ask.late)
                    self._left.add(client.request.request_id)
                self._left.add(client.name)
                client.leave()
        return moved

    def _take(self, client_index: int, outputs: Any, now: int) -> bool:
        for output in outputs.outputs:
            client = self._by_request[output.request_id]
            assert client.ask.client == client_index
            if client.name not in self._left:
                client.take(output, now)
        self._finished.update(outputs.finished_requests or ())
        return bool(outputs.outputs)

    def _check_same_graph(self) -> None:
        """All rows are 1 + K wide, so every rank, idle or not, enters the full graph of uniform steps."""
        for rank, engine in enumerate(self.engines):
            odd = {name: tokens for name, tokens in engine.rows.items() if tokens != self.shape.width}
            assert not odd, f"rank {rank} has rows of {odd}, not {self.shape.width}"
            assert not engine.violations, f"rank {rank}: {engine.violations}"
            assert len(engine.rows) <= self.shape.max_num_seqs

    def _is_over(self, now: int) -> bool:
        last_abort = max((client.ask.abort_at or 0 for client in self.clients), default=0)
        return (
            all(client.is_done for client in self.clients)
            and now > last_abort
            and not any(engine.has_work() or engine.receiver.outstanding for engine in self.engines)
        )

    def _check_end(self) -> None:
        for client in self.clients:
            client.check_end(left=client.name in self._left)
        assert self._finished == Counter(list(self._by_request)), "each attempt is finished once"
        for engine in self.engines:
            scheduler = engine.scheduler
            left = {name: getattr(scheduler, name) for name in _EMPTY_AT_THE_END}
            assert not any(left.values()), left
            if self.shape.scheduler == "lockstep":
                assert not scheduler._drafts
                assert not scheduler._ended
            if self.shape.connector == "lockstep":
                assert not scheduler.connector.connector_scheduler._hand_offs
            assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == self.shape.num_blocks - 1
            assert not engine.worker.states

    def _open(self) -> list[str]:
        return [client.name for client in self.clients if not client.is_done] + [
            f"{request_id} {request.status.name}"
            for engine in self.engines
            for request_id, request in engine.scheduler.requests.items()
        ]

    def _result(self) -> Result:
        violations = Counter(cause for engine in self.engines for cause in engine.violations)
        counters = [
            engine.scheduler.lockstep_counters() if self.shape.scheduler == "lockstep" else {}
            for engine in self.engines
        ]
        num_steps = sum(engine.num_steps for engine in self.engines)
        return Result(num_steps, self.clients, violations, counters)


def bounce_counts(result: Result) -> Counter[str]:
    """How often clients were handed back, by reason."""
    return Counter(str(reason) for client in result.clients for reason in client.bounces)


def ended_by(result: Result) -> Counter[FinishReason]:
    return Counter(client.finish_reason for client in result.clients)
