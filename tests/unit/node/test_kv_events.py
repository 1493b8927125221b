"""Which blocks a rank has cached: the tap on vLLM's own block pool, and what a node tells proxies of it."""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_events import EventBatch, EventPublisher, KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from lockstep.node.kv_events import KEY_BYTES
from lockstep.node.kv_events.blocks import KVBlocks
from lockstep.node.kv_events.engine_tap import KVEventTap
from lockstep.rpc.generated import lockstep_pb2 as pb

BLOCK_TOKENS = 4
DEADLINE_S = 5.0


class Published(EventPublisher):
    """Whatever publisher the user asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[EventBatch] = []

    def publish(self, events: EventBatch) -> None:
        self.batches.append(events)

    def shutdown(self) -> None:
        pass


class Engine:
    """vLLM's block pool with a tap, and what its scheduler does with it in a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_blocks: int = 9) -> None:
        monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.pool = BlockPool(num_blocks, True, BLOCK_TOKENS, enable_kv_cache_events=True)
        self.published = Published()
        self.tap = KVEventTap(self.published, self.pool, 0)
        self.seen = -1

    def compute(self, first_token: int, num_blocks: int) -> tuple[list[str], list[Any]]:
        """Compute and free a prompt; gives the keys of its blocks, and the blocks."""
        tokens = list(range(first_token, first_token + num_blocks * BLOCK_TOKENS))
        request = Request("r", tokens, SamplingParams(), None, block_hasher=self._hasher)
        blocks = self.pool.get_new_blocks(num_blocks)
        self.pool.cache_full_blocks(request, blocks, 0, num_blocks, BLOCK_TOKENS, 0)
        self.pool.free_blocks(reversed(blocks))
        return [h[-KEY_BYTES:].hex() for h in request.block_hashes], blocks

    def step(self) -> None:
        events = self.pool.take_events()
        if events:
            self.tap.publish(KVEventBatch(ts=0.0, events=events))

    def answer(self) -> dict[str, Any]:
        """What a reader that has read all gets now; {} if it has to wait."""
        answer = self.tap.next_changes(self.seen)
        if isinstance(answer, Future):
            if not answer.done():
                return {}
            answer = answer.result()
        self.seen = answer["number"]
        return answer


def keys(packed: bytes) -> set[str]:
    return {packed[i : i + KEY_BYTES].hex() for i in range(0, len(packed), KEY_BYTES)}


def test_first_answer_is_a_snapshot_then_come_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks from before the tap too; the publisher that was there gets every batch."""
    engine = Engine(monkeypatch)
    first, _ = engine.compute(0, 2)
    engine.step()
    answer = engine.answer()
    assert (answer["snapshot"], keys(answer["stored"])) == (True, set(first))
    second, _ = engine.compute(100, 1)
    engine.step()
    answer = engine.answer()
    assert (answer["snapshot"], keys(answer["stored"]), answer["removed"]) == (False, set(second), b"")
    assert len(engine.published.batches) == 2


def test_reader_waits_for_the_next_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets a future, which the step that changes something resolves."""
    engine = Engine(monkeypatch)
    engine.answer()
    waiting = engine.tap.next_changes(engine.seen)
    engine.step()
    assert isinstance(waiting, Future)
    assert not waiting.done()
    stored, _ = engine.compute(0, 1)
    engine.step()
    assert keys(waiting.result(timeout=0)["stored"]) == set(stored)


def test_reader_is_told_after_the_outputs_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the engine's loop says when they are out; what one step changes comes once."""
    engine = Engine(monkeypatch)
    engine.answer()
    waiting = engine.tap.next_changes(engine.seen)
    engine.tap.told_after_steps = True
    stored, _ = engine.compute(0, 1)
    engine.step()
    assert isinstance(waiting, Future)
    assert not waiting.done()
    engine.tap.tell()
    assert keys(waiting.result(timeout=0)["stored"]) == set(stored)


def test_evicted_blocks_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 blocks are there: the last of 10 evict two of the first."""
    engine = Engine(monkeypatch)
    old, _ = engine.compute(0, 4)
    engine.step()
    engine.answer()
    new, _ = engine.compute(100, 6)
    engine.step()
    answer = engine.answer()
    assert keys(answer["stored"]) == set(new)
    assert keys(answer["removed"]) == set(old[2:])


def test_block_is_there_as_long_as_one_of_its_copies_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM stores and removes a hash once for each copy; the first removal does not make it absent."""
    engine = Engine(monkeypatch)
    copy, _ = engine.compute(0, 1)
    _, blocks = engine.compute(0, 1)
    engine.step()
    assert keys(engine.answer()["stored"]) == set(copy)
    engine.pool.evict_blocks({blocks[0].block_id})
    engine.step()
    assert engine.answer() == {}


def test_cleared_cache_is_an_empty_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    engine.compute(0, 2)
    engine.step()
    engine.answer()
    assert engine.pool.reset_prefix_cache()
    engine.step()
    answer = engine.answer()
    assert (answer["snapshot"], answer["stored"]) == (True, b"")


def test_lost_answer_is_made_up_for_by_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader whose call was cancelled asks with the number that it has."""
    engine = Engine(monkeypatch)
    engine.answer()
    lost = engine.tap.next_changes(engine.seen)
    stored, _ = engine.compute(0, 2)
    engine.step()
    assert isinstance(lost, Future)
    answer = engine.answer()
    assert (answer["snapshot"], keys(answer["stored"])) == (True, set(stored))


def test_what_nobody_reads_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """More changes than the pool has blocks become a snapshot."""
    engine = Engine(monkeypatch)
    engine.answer()
    for i in range(20):
        engine.compute(i * 100, 4)
        engine.step()
    assert len(engine.tap._touched) <= engine.pool.num_gpu_blocks
    last, _ = engine.compute(5000, 8)
    engine.step()
    answer = engine.answer()
    assert (answer["snapshot"], keys(answer["stored"])) == (True, set(last))


def answered(number: int, stored: bytes = b"", removed: bytes = b"", *, snapshot: bool = False) -> Any:
    return {"number": number, "snapshot": snapshot, "stored": stored, "removed": removed}


def test_late_proxy_is_greeted_with_what_there_is() -> None:
    """And goes on with the number of the last change."""
    blocks, told, late = KVBlocks(), list[pb.NodeFrame](), list[pb.NodeFrame]()
    blocks.take(1, answered(1, b"A" * 8 + b"B" * 8, snapshot=True), told.append)
    blocks.take(1, answered(2, b"C" * 8, b"A" * 8), told.append)
    blocks.take(1, answered(3), told.append)
    assert [(f.kv_blocks.rank, f.kv_blocks.number, f.kv_blocks.snapshot) for f in told] == [
        (1, 1, True),
        (1, 2, False),
    ]
    blocks.greet(late.append)
    (snapshot,) = (frame.kv_blocks for frame in late)
    assert (snapshot.number, snapshot.snapshot) == (2, True)
    assert keys(snapshot.stored) == {(b"B" * 8).hex(), (b"C" * 8).hex()}


def test_rank_that_tells_nothing_is_not_told_of() -> None:
    frames = list[pb.NodeFrame]()
    KVBlocks().greet(frames.append)
    KVBlocks().resend(3, frames.append)
    assert frames == []


async def test_ranks_are_followed_each_for_itself() -> None:
    """An idle rank does not hold up what another one says; each call names the answer before it."""
    calls: list[tuple[int, int]] = []
    said: asyncio.Queue[pb.NodeFrame] = asyncio.Queue()

    async def kv_events(local_rank: int, seen: int) -> Any:
        calls.append((local_rank, seen))
        if local_rank == 0 or len(calls) > 3:
            await asyncio.Event().wait()
        return answered(7 + len(calls), b"A" * 8, snapshot=seen == -1)

    engine = SimpleNamespace(num_ranks=2, kv_events=kv_events)
    following = asyncio.create_task(KVBlocks().follow(engine, said.put_nowait))
    first = await asyncio.wait_for(said.get(), DEADLINE_S)
    second = await asyncio.wait_for(said.get(), DEADLINE_S)
    following.cancel()
    assert (first.kv_blocks.rank, first.kv_blocks.snapshot) == (1, True)
    assert (second.kv_blocks.rank, second.kv_blocks.number) == (1, 2)
    assert calls[:3] == [(0, -1), (1, -1), (1, 9)]
