"""Two ranks with vLLM's engine loops and its coordinator, and their clients; see `parked_rank.py`."""

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
from simulator.client import Ask, Client
from simulator.parked_rank import ROUND_TIMEOUT_S, TICK_S, Rank, Rounds
from simulator.shape import Shape
from vllm.config import ParallelConfig
from vllm.v1.engine.coordinator import DPCoordinatorProc

from lockstep.node.parking import plugin

RANKS = 2


class SyncGroup:
    """The ranks' process group: `ParallelConfig.sync_dp_state` among threads."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS, timeout=ROUND_TIMEOUT_S)
        self._votes: dict[int, tuple[bool, bool]] = {}

    def sync(self, *, has_unfinished: bool, pending_pause: bool) -> tuple[bool, bool]:
        self._votes[threading.get_ident()] = has_unfinished, pending_pause
        self._barrier.wait()
        votes = list(self._votes.values())
        self._barrier.wait()
        return any(unfinished for unfinished, _ in votes), all(pause for _, pause in votes)


class ParkedGroup:
    """Runs until `drive` has seen every client to its end."""

    def __init__(self, shape: Shape, directory: Path) -> None:
        self.rounds = Rounds(RANKS)
        front, back_out, back_in = (f"ipc://{directory}/{name}" for name in ("front", "out", "in"))
        self._coordinator = DPCoordinatorProc(RANKS)
        self._addresses = front, back_out, back_in
        self._thread = threading.Thread(target=self._coordinate, daemon=True)
        group = SyncGroup()
        self.ranks = [Rank(rank, shape, self.rounds, group, (back_out, back_in)) for rank in range(RANKS)]
        self.shape = shape

    def start(self) -> None:
        self._thread.start()
        for rank in self.ranks:
            rank.start()

    def stop(self) -> None:
        try:
            for rank in self.ranks:
                rank.stop()
        finally:
            self._coordinator.ctx.term()
            self._thread.join(5)

    def drive(self, asks: Sequence[Ask], timeout_s: float = 30.0) -> list[Client]:
        """Send what is due, pass outputs on, and check that everybody gets what is theirs."""
        clients = [Client(ask, f"c{index}", self.shape) for index, ask in enumerate(asks)]
        by_request: dict[str, Client] = {}
        left: set[str] = set()
        started = time.monotonic()
        while not all(client.is_done for client in clients) or self._busy():
            assert time.monotonic() - started < timeout_s, [
                client for client in clients if not client.is_done
            ]
            for rank in self.ranks:
                assert rank.error is None, rank.error
                self._pass_on(rank, by_request, left)
            now = int((time.monotonic() - started) / TICK_S)
            for client in clients:
                self._act(client, now, by_request, left)
            time.sleep(0.001)
        for client in clients:
            client.check_end(left=client.name in left)
        return clients

    def _act(self, client: Client, now: int, by_request: dict[str, Client], left: set[str]) -> None:
        if client.submit_at is not None and client.submit_at <= now and not client.is_done:
            request = client.make_request(now)
            by_request[request.request_id] = client
            self.ranks[client.rank].add(request, client.conversation, client.push)
        if client.grammar_at is not None and client.grammar_at <= now:
            client.compile_grammar()
        if client.ask.abort_at is not None and client.ask.abort_at <= now and not client.is_done:
            if client.request is not None:
                self.ranks[client.rank].abort(client.request.request_id)
            left.add(client.name)
            client.leave()

    def _pass_on(self, rank: Rank, by_request: dict[str, Client], left: set[str]) -> None:
        try:
            while True:
                for output in rank.outputs.get_nowait().outputs:
                    client = by_request[output.request_id]
                    if client.name not in left:
                        client.take(output, int(time.monotonic() / TICK_S))
                        client.submit_at = 0 if client.submit_at is not None else None
        except queue.Empty:
            return

    def _busy(self) -> bool:
        return any(
            rank.core.scheduler.requests or rank.executor.connector.outstanding or not rank.outputs.empty()
            for rank in self.ranks
        )

    def _coordinate(self) -> None:
        with suppress(zmq.ContextTerminated):
            self._coordinator.process_input_socket(*self._addresses)


@contextmanager
def parked_group(shape: Shape, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ParkedGroup]:
    plugin.register()

    def sync_dp_state(dp_group: SyncGroup, **votes: Any) -> tuple[bool, bool]:
        return dp_group.sync(**votes)

    monkeypatch.setattr(ParallelConfig, "sync_dp_state", staticmethod(sync_dp_state))
    group = ParkedGroup(shape, directory)
    group.start()
    try:
        yield group
    finally:
        group.stop()
