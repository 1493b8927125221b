"""Listens to a decode node's step records as a proxy would, by a session of its own that sends no request."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc.aio

from lockstep.rpc.channel import PROTOCOL_VERSION, connect
from lockstep.rpc.generated import lockstep_pb2 as pb
from lockstep.rpc.generated.lockstep_pb2_grpc import NodeStub

WELCOME_TIMEOUT_S = 10.0
QUIET_S = 2.5
"""A node broadcasts its steps once a second, so this long without any means that none were made."""
QUIET_TIMEOUT_S = 30.0
"""A group without work makes dummy steps until its ranks next agree, at most 32 more."""


@dataclass
class StepLog:
    """All steps that the node's ranks made while it was listened to: `by_rank[rank][step number]`."""

    by_rank: dict[int, dict[int, pb.StepRecord]] = field(default_factory=dict)
    dropped: int = 0

    def add(self, records: pb.StepRecords) -> None:
        self.dropped += records.dropped
        self.by_rank.setdefault(records.rank, {}).update({record.step: record for record in records.records})

    async def quiet(self) -> None:
        """Wait until the group makes no steps, and forget those it made until then."""
        async with asyncio.timeout(QUIET_TIMEOUT_S):
            while True:
                self.by_rank.clear()
                await asyncio.sleep(QUIET_S)
                if not self.by_rank:
                    return

    def of(self, rank: int) -> list[pb.StepRecord]:
        """One rank's steps in order."""
        return [self.by_rank[rank][step] for step in sorted(self.by_rank[rank])]

    def check_lockstep(self, num_ranks: int, width: int) -> None:
        """Every step of every rank is FULL and `width` tokens a row, dummy steps too, and equal on all ranks.

        The engines are read once a second, one after the other, so the first and last few steps may be known
        of one rank only; in between none may be missing.
        """
        assert set(self.by_rank) == set(range(num_ranks)), sorted(self.by_rank)
        assert self.dropped == 0
        for rank, steps in self.by_rank.items():
            assert sorted(steps) == list(range(min(steps), max(steps) + 1)), f"rank {rank}: steps are missing"
            odd = [step for step in steps.values() if step.mode != "FULL" or step.width != width]
            assert not odd, f"rank {rank}: {odd[:3]}"
            ragged = [step for step in steps.values() if step.tokens != step.rows * width]
            assert not ragged, f"rank {rank}: {ragged[:3]}"
        common = set.intersection(*(set(steps) for steps in self.by_rank.values()))
        assert len(common) >= max(map(len, self.by_rank.values())) - 8, "the ranks' steps are not the same"
        for number in common:
            agreed = {(s[number].mode, s[number].padded_tokens) for s in self.by_rank.values()}
            assert len(agreed) == 1, (number, [s[number] for s in self.by_rank.values()])


@contextlib.asynccontextmanager
async def step_records(grpc_address: str) -> AsyncIterator[StepLog]:
    """Listen until the end of the block; what the node broadcasts once a second is in the log."""
    log = StepLog()
    outgoing: asyncio.Queue[pb.ProxyFrame] = asyncio.Queue()
    hello = pb.Hello(protocol_version=PROTOCOL_VERSION, proxy_id=f"listener-{uuid.uuid4().hex}")
    outgoing.put_nowait(pb.ProxyFrame(hello=hello))

    async def frames() -> AsyncIterator[pb.ProxyFrame]:
        while True:
            yield await outgoing.get()

    async with connect(grpc_address) as channel:
        call = NodeStub(channel).Session(frames())
        first = await asyncio.wait_for(call.read(), WELCOME_TIMEOUT_S)
        assert first.WhichOneof("frame") == "welcome", first
        reader = asyncio.create_task(_read(call, log))
        try:
            yield log
        finally:
            reader.cancel()
            call.cancel()
            await asyncio.gather(reader, return_exceptions=True)


async def _read(call: grpc.aio.StreamStreamCall, log: StepLog) -> None:
    while (frame := await call.read()) is not grpc.aio.EOF:
        if frame.WhichOneof("frame") == "records":
            log.add(frame.records)
