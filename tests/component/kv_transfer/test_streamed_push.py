"""A prompt's KV on its way from one real connector to another, chunk by chunk, in every order of events."""

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from unittest import mock

import pytest
from component.kv_transfer.engines import BLOCK_SIZE, STEP_TOKENS, Pair
from vllm.v1.request import Request

pytestmark = pytest.mark.usefixtures("world")

NUM_BLOCKS = 40
_ids = (f"ls-{number}-0-a1" for number in itertools.count())


@pytest.fixture(scope="module")
def shared_pair(world: None) -> Iterator[Pair]:
    with closing(Pair(NUM_BLOCKS, {})) as pair:
        yield pair


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    """Both engines, without a block in use before or after the test."""
    assert shared_pair.idle
    yield shared_pair
    shared_pair.until(lambda: shared_pair.idle)


def new_prompt(num_tokens: int) -> list[int]:
    """Random, so that nothing of it is in a prefix cache."""
    return random.sample(range(10, 9000), num_tokens)


def counted(pair: Pair, name: str) -> int:
    return int(pair.prefill.counters[name])


@contextmanager
def writes_say(pair: Pair, state: str) -> Iterator[None]:
    """While open, NIXL says this of every write of prefill ("PROC": a link that does not get on)."""
    worker: Any = pair.prefill.workers[0].connector_worker
    with mock.patch.object(worker.nixl_wrapper, "check_xfer_state", return_value=state):
        yield


def registered(pair: Pair, prompt: list[int]) -> Request:
    """Register on decode and queue on prefill, whose next step computes it; returns decode's request."""
    request_id = next(_ids)
    request = pair.add_decode(request_id, prompt)
    pair.decode.step()
    pair.wait(lambda: pair.prefill.outstanding)
    pair.add_prefill(request_id, prompt)
    return request


def first_chunk_of(pair: Pair, prompt: list[int]) -> Request:
    """Register on decode and compute one chunk on prefill; returns decode's request."""
    request = registered(pair, prompt)
    pair.prefill.step()
    return request


def push_of(pair: Pair, prompt: list[int]) -> Request:
    """Run both legs until decode has the KV; returns decode's request, before its first decode step."""
    request_id = next(_ids)
    pair.add_prefill(request_id, prompt)
    request = pair.add_decode(request_id, prompt)
    receive(pair, request)
    return request


def receive(pair: Pair, request: Request) -> None:
    """Step until decode's worker has the KV of `request`; the step that would use it is not run."""
    before = pair.decode.received
    pair.until(lambda: pair.decode.received > before)
    assert request.request_id not in pair.decode.failed


def test_long_prompt_is_written_while_it_is_computed(pair: Pair) -> None:
    """All chunks but the last are written before the prompt is done, and decode's blocks hold its KV."""
    prompt = new_prompt(5 * STEP_TOKENS + 10)
    request_id = next(_ids)
    request = pair.add_decode(request_id, prompt)
    pair.decode.step()
    pair.add_prefill(request_id, prompt)
    before, blocks = counted(pair, "streamed_chunks"), counted(pair, "pushed_blocks")
    for chunk in range(1, 6):
        pair.prefill.step()
        pair.wait(lambda expected=chunk: counted(pair, "streamed_chunks") - before == expected)
    assert pair.decode.received == 0
    pair.prefill.step()
    pair.wait(lambda: pair.decode.received == 1)
    assert counted(pair, "pushed_blocks") - blocks == 11
    assert pair.decode.holds_kv_of(request)


def test_a_write_is_made_while_its_step_runs(pair: Pair) -> None:
    """What is written once the step has run was made before; each write is made once."""
    push_of(pair, new_prompt(20))  # both engines know each other
    request = registered(pair, new_prompt(2 * STEP_TOKENS))
    worker: Any = pair.prefill.workers[0].connector_worker
    prepared: list[int] = []
    compute = worker.wait_for_save

    def look_and_compute() -> None:
        pair.wait(lambda: pair.prefill.prepared == 1)
        prepared.append(pair.prefill.writing)
        compute()

    made = worker.nixl_wrapper.make_prepped_xfer
    with (
        mock.patch.object(worker, "wait_for_save", look_and_compute),
        mock.patch.object(worker.nixl_wrapper, "make_prepped_xfer", side_effect=made) as making,
    ):
        for _ in range(2):
            pair.prefill.step()
            pair.wait(lambda: not pair.prefill.writing and not pair.prefill.prepared)
    pair.wait(lambda: pair.decode.received > 1)
    assert prepared == [0, 0]
    assert making.call_count == 2
    assert pair.decode.holds_kv_of(request)


def test_a_prepared_write_that_is_not_wanted_is_given_back(pair: Pair) -> None:
    """Decode gives the request up while the step runs: nothing is written, no handle stays."""
    push_of(pair, new_prompt(20))
    request = registered(pair, new_prompt(STEP_TOKENS))
    worker: Any = pair.prefill.workers[0].connector_worker
    compute = worker.wait_for_save

    def give_up_and_compute() -> None:
        pair.wait(lambda: pair.prefill.prepared == 1)
        pair.decode.abort(request.request_id)
        pair.decode.step()
        pair.wait(lambda: not pair.prefill.outstanding)
        compute()

    pushed = counted(pair, "pushed_chunks")
    with mock.patch.object(worker, "wait_for_save", give_up_and_compute):
        pair.prefill.step()
    pair.until(lambda: pair.idle)
    assert counted(pair, "pushed_chunks") == pushed


def test_a_lost_connection_takes_its_prepared_writes_along(pair: Pair) -> None:
    """They do not keep it from being made anew while the step runs; the KV goes over the new one."""
    push_of(pair, new_prompt(20))  # both engines know each other
    request = registered(pair, new_prompt(STEP_TOKENS))
    worker: Any = pair.prefill.workers[0].connector_worker
    compute = worker.wait_for_save

    def lose_and_compute() -> None:
        pair.wait(lambda: pair.prefill.prepared == 1)
        (engine_id,) = worker._remote_agents
        worker._writer._enqueue(lambda: worker._writer.peers.lost(engine_id))
        pair.wait(lambda: engine_id not in worker._remote_agents)
        assert not pair.prefill.prepared
        compute()

    before = pair.decode.received
    with mock.patch.object(worker, "wait_for_save", lose_and_compute):
        pair.prefill.step()
    pair.wait(lambda: pair.decode.received > before)
    assert pair.decode.holds_kv_of(request)


def test_an_engine_step_wakes_no_writer_that_has_nothing_to_do(pair: Pair) -> None:
    """Its thread would take turns with the engine's, once a step."""
    for engine in (pair.prefill, pair.decode):
        worker: Any = engine.workers[0].connector_worker
        with mock.patch.object(worker._push_writer_wake, "set") as wake:
            engine.step()
        assert not wake.called


def test_last_chunk_needs_no_further_step_of_prefill(pair: Pair) -> None:
    """Prefill's engine may be busy with others: the KV is whole and decode told without its next step."""
    prompt = new_prompt(70)
    request_id = next(_ids)
    request = pair.add_decode(request_id, prompt)
    pair.decode.step()
    pair.add_prefill(request_id, prompt)
    before = pair.decode.received
    pair.prefill.step()
    pair.prefill.step()
    pair.wait(lambda: pair.decode.received > before)
    assert pair.decode.holds_kv_of(request)


def test_registration_after_the_prompt_is_pushed_at_once(pair: Pair) -> None:
    """Everything that was computed before decode registered goes in one write."""
    prompt = new_prompt(200)
    request_id = next(_ids)
    pair.add_prefill(request_id, prompt)
    for _ in range(6):
        pair.prefill.step()
    before = counted(pair, "pushed_chunks"), counted(pair, "streamed_chunks")
    request = pair.add_decode(request_id, prompt)
    receive(pair, request)
    assert (counted(pair, "pushed_chunks"), counted(pair, "streamed_chunks")) == (before[0] + 1, before[1])
    assert pair.decode.holds_kv_of(request)


def test_registration_in_the_middle_catches_up(pair: Pair) -> None:
    """Chunks that were computed before decode registered go together, the later ones on their own."""
    prompt = new_prompt(5 * STEP_TOKENS)
    request_id = next(_ids)
    pair.add_prefill(request_id, prompt)
    before = counted(pair, "pushed_chunks")
    pair.prefill.step()
    pair.prefill.step()
    request = pair.add_decode(request_id, prompt)
    pair.decode.step()
    pair.wait(lambda: counted(pair, "pushed_chunks") - before == 1)
    pair.prefill.step()
    pair.wait(lambda: counted(pair, "pushed_chunks") - before == 2)
    receive(pair, request)
    assert pair.decode.holds_kv_of(request)


@pytest.mark.parametrize("prefill_has_it_too", [True, False])
def test_decodes_prefix_hit_is_not_written(pair: Pair, prefill_has_it_too: bool) -> None:
    """Blocks in decode's own cache are skipped, wherever prefill's chunks begin; the rest is in its place."""
    prefix = new_prompt(5 * BLOCK_SIZE)
    push_of(pair, [*prefix, *new_prompt(40)])
    pair.until(lambda: pair.idle)
    if not prefill_has_it_too:
        assert pair.prefill.scheduler.reset_prefix_cache()
    before = counted(pair, "pushed_blocks")
    request = push_of(pair, [*prefix, *new_prompt(70)])
    assert counted(pair, "pushed_blocks") - before == 3
    assert pair.decode.holds_kv_of(request)


def test_complete_prefix_hit_still_registers(pair: Pair) -> None:
    """Decode has all it can have, and yet registers its last block and gets the notice."""
    prompt = new_prompt(2 * BLOCK_SIZE + 1)
    push_of(pair, prompt)
    pair.until(lambda: pair.idle)
    before = counted(pair, "pushed_blocks")
    request = push_of(pair, prompt)
    assert counted(pair, "pushed_blocks") - before == 1
    assert pair.decode.holds_kv_of(request)


def test_preempted_prompt_is_written_anew(pair: Pair) -> None:
    """Blocks lost in mid-prompt hold something else by then; decode gets what was computed afterwards."""
    prompt = new_prompt(5 * STEP_TOKENS + 10)
    request_id = next(_ids)
    request = pair.add_decode(request_id, prompt)
    pair.decode.step()
    pair.add_prefill(request_id, prompt)
    before, restarted = counted(pair, "streamed_chunks"), counted(pair, "restarted_pushes")
    pair.prefill.step()
    pair.prefill.step()
    pair.wait(lambda: counted(pair, "streamed_chunks") - before == 2)
    assert pair.prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    for caches in pair.prefill.caches:
        for cache in caches.values():
            cache.fill_(-1.0)
    receive(pair, request)
    assert counted(pair, "restarted_pushes") - restarted == 1
    assert pair.decode.holds_kv_of(request)


def test_prefill_abort_in_mid_prompt_fails_decode_at_once(pair: Pair) -> None:
    """Chunks were written already; decode learns of the end without any deadline and frees its blocks."""
    prompt = new_prompt(5 * STEP_TOKENS)
    request_id = next(_ids)
    pair.add_decode(request_id, prompt)
    pair.decode.step()
    pair.add_prefill(request_id, prompt)
    pair.prefill.step()
    pair.prefill.step()
    pair.prefill.abort(request_id)
    pair.until(lambda: request_id in pair.decode.failed, deadline_s=5)
    pair.until(lambda: pair.idle, deadline_s=5)
    assert pair.decode.counters["failed"]["finished_aborted"] >= 1


def test_decode_hears_of_the_end_while_a_write_is_in_flight(pair: Pair) -> None:
    """The request fails at once; its blocks are not reused before the write has ended."""
    with writes_say(pair, "PROC"):
        request_id = first_chunk_of(pair, new_prompt(3 * STEP_TOKENS)).request_id
        pair.wait(lambda: pair.prefill.writing)
        pair.prefill.abort(request_id)
        pair.until(lambda: request_id in pair.decode.failed, deadline_s=5)
        assert pair.prefill.kv_usage == 0
        for _ in range(20):
            pair.decode.step()
        assert pair.decode.kv_usage > 0
    pair.until(lambda: pair.idle, deadline_s=5)


def test_decode_abort_waits_for_the_write_in_flight(pair: Pair) -> None:
    """Decode's blocks may be written until prefill has answered."""
    with writes_say(pair, "PROC"):
        request_id = first_chunk_of(pair, new_prompt(3 * STEP_TOKENS)).request_id
        pair.wait(lambda: pair.prefill.writing)
        pair.decode.abort(request_id)
        for _ in range(20):
            pair.decode.step()
            pair.prefill.step()
        assert pair.decode.kv_usage > 0
    pair.until(lambda: pair.idle, deadline_s=5)


def test_nothing_is_written_anew_beside_an_old_write(pair: Pair) -> None:
    """After a preemption the old write could land last; the new ones wait for its end."""
    written = counted(pair, "pushed_chunks")
    with writes_say(pair, "PROC"):
        request = first_chunk_of(pair, new_prompt(3 * STEP_TOKENS))
        pair.wait(lambda: pair.prefill.writing)
        assert pair.prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
        for _ in range(6):
            pair.prefill.step()
        assert pair.prefill.writing == 1
    receive(pair, request)
    assert counted(pair, "pushed_chunks") - written == 2
    assert pair.decode.holds_kv_of(request)


def test_failed_write_fails_decode_and_releases_prefill(pair: Pair) -> None:
    """The later chunks are not written; the finished prompt's blocks come back at once."""
    with writes_say(pair, "ERR"):
        request_id = first_chunk_of(pair, new_prompt(3 * STEP_TOKENS)).request_id
        pair.until(lambda: request_id in pair.decode.failed, deadline_s=5)
        written = counted(pair, "pushed_chunks")
        pair.until(lambda: pair.idle, deadline_s=5)
    assert counted(pair, "pushed_chunks") == written
    assert pair.prefill.counters["released"]["push_failed"] >= 1


@pytest.mark.parametrize("prepared", [True, False])
def test_a_write_that_nixl_does_not_take_is_a_failed_write(pair: Pair, prepared: bool) -> None:
    """Whether it was made while the step ran or after it: both sides end at once, no handle stays."""
    push_of(pair, new_prompt(20))  # both engines know each other
    worker: Any = pair.prefill.workers[0].connector_worker
    agent = worker.nixl_wrapper
    refused: list[Any] = []

    def refuse(handle: Any) -> str:
        if agent._only_preparing:
            return "PROC"
        refused.append(handle)
        raise RuntimeError("NIXL_ERR_BACKEND")

    def not_foreseen(chunks: Any) -> None:
        pass

    released = pair.prefill.counters["released"].get("push_failed", 0)
    with (
        mock.patch.object(agent, "transfer", side_effect=refuse),
        mock.patch.object(worker._writer, "foresee", worker._writer.foresee if prepared else not_foreseen),
    ):
        request_id = first_chunk_of(pair, new_prompt(STEP_TOKENS)).request_id
        pair.until(lambda: request_id in pair.decode.failed, deadline_s=5)
    pair.until(lambda: pair.idle, deadline_s=5)
    assert len(refused) == 1
    assert pair.prefill.counters["released"].get("push_failed", 0) == released + 1


def test_decode_abort_in_mid_prompt_stops_the_writes(pair: Pair) -> None:
    """No chunk is written after the cancel, decode's blocks come back, prefill holds nothing at the end."""
    prompt = new_prompt(5 * STEP_TOKENS)
    request_id = next(_ids)
    pair.add_decode(request_id, prompt)
    pair.decode.step()
    pair.add_prefill(request_id, prompt)
    pair.prefill.step()
    answered = pair.prefill.counters["refused"].get("aborted", 0)
    pair.decode.abort(request_id)
    pair.decode.step()
    pair.wait(lambda: pair.prefill.counters["refused"].get("aborted", 0) > answered)
    written = counted(pair, "pushed_chunks")
    for _ in range(6):
        pair.prefill.step()
    pair.until(lambda: pair.idle, deadline_s=5)
    assert counted(pair, "pushed_chunks") == written


def test_many_requests_at_once(pair: Pair) -> None:
    """Chunks of prompts that share steps are written to the right places."""
    prompts = {next(_ids): new_prompt(length) for length in (20, 130, 64, 200)}
    requests = [pair.add_decode(request_id, prompt) for request_id, prompt in prompts.items()]
    pair.decode.step()
    for request_id, prompt in prompts.items():
        pair.add_prefill(request_id, prompt)
    before = pair.decode.received
    for _ in range(8):
        pair.prefill.step()
    pair.wait(lambda: pair.decode.received - before == len(prompts))
    assert all(pair.decode.holds_kv_of(request) for request in requests)


@pytest.mark.parametrize("tp_sizes", [(2, 1), (1, 2)], ids=["2 to 1", "1 to 2"])
def test_chunks_go_to_the_ranks_of_another_tensor_parallel_size(tp_sizes: tuple[int, int]) -> None:
    """Each prefill worker writes its heads into every decode worker that needs them, chunk by chunk."""
    with closing(Pair(NUM_BLOCKS, {}, tp_sizes=tp_sizes)) as pair:
        prompt = new_prompt(3 * STEP_TOKENS + 5)
        request_id = next(_ids)
        request = pair.add_decode(request_id, prompt)
        pair.decode.step()
        pair.add_prefill(request_id, prompt)
        for chunk in range(1, 4):
            pair.prefill.step()
            pair.wait(lambda expected=chunk: counted(pair, "streamed_chunks") == expected)
        receive(pair, request)
        assert pair.decode.holds_kv_of(request)
        pair.until(lambda: pair.idle)


def test_streaming_can_be_turned_off() -> None:
    """For comparison: one write, when the prompt is done."""
    with closing(Pair(NUM_BLOCKS, {"lockstep_stream_chunks": False})) as pair:
        request = push_of(pair, new_prompt(3 * STEP_TOKENS))
        assert (counted(pair, "pushed_chunks"), counted(pair, "streamed_chunks")) == (1, 0)
        assert pair.decode.holds_kv_of(request)


def test_stalled_prompt_ends_at_decodes_deadline() -> None:
    """Prefill hangs after its first chunk: decode fails the request, and a late chunk is not written."""
    with closing(Pair(NUM_BLOCKS, {"lockstep_registration_deadline_s": 0.5})) as pair:
        prompt = new_prompt(4 * STEP_TOKENS)
        request_id = next(_ids)
        pair.add_decode(request_id, prompt)
        pair.decode.step()
        pair.add_prefill(request_id, prompt)
        pair.prefill.step()
        pair.wait(lambda: counted(pair, "pushed_chunks") == 1)

        def failed() -> bool:
            pair.decode.step()
            return request_id in pair.decode.failed

        pair.wait(failed, deadline_s=5)
        pair.until(lambda: pair.idle, deadline_s=5)
        assert counted(pair, "pushed_chunks") == 1
        assert pair.prefill.counters["released"] == {"deadline": 1}


def test_lease_is_renewed_while_decode_queues_and_ends_where_nobody_waits() -> None:
    """Decode has no room for one request, and heartbeats keep its KV on prefill; the lease of one that no
    decode node knows ends in time, although it stands behind the renewed one."""
    lease_s = 3.0
    options = {
        "kv_lease_duration": lease_s,
        "lockstep_stall_patience_s": 60.0,
    }  # the blocker keeps its blocks
    with closing(Pair(NUM_BLOCKS, options)) as pair:
        blocker, queued, forgotten = (next(_ids) for _ in range(3))
        prompt = new_prompt(10 * BLOCK_SIZE)
        pair.add_decode(blocker, new_prompt(31 * BLOCK_SIZE))
        pair.decode.step()
        request = pair.add_decode(queued, prompt)
        pair.add_prefill(queued, prompt)
        pair.add_prefill(forgotten, new_prompt(BLOCK_SIZE))
        pair.until(lambda: not pair.prefill.scheduler.running and not pair.prefill.scheduler.waiting)
        finished_at = time.monotonic()
        pair.until(lambda: forgotten not in pair.prefill.scheduler.requests)
        assert 0.8 * lease_s < time.monotonic() - finished_at < 1.4 * lease_s
        pair.until(lambda: time.monotonic() - finished_at > 1.5 * lease_s)
        assert queued in pair.prefill.scheduler.requests
        pair.decode.abort(blocker)
        receive(pair, request)
        assert pair.decode.holds_kv_of(request)
        pair.until(lambda: pair.idle)


def test_lease_that_is_over_is_overdue_until_the_next_engine_step() -> None:
    """An engine without steps does not give the blocks back; that it should have is seen from outside."""
    with closing(Pair(NUM_BLOCKS, {"kv_lease_duration": 3.0})) as pair:
        forgotten = next(_ids)
        pair.add_prefill(forgotten, new_prompt(BLOCK_SIZE))
        pair.until(lambda: pair.prefill.counters["leases_held"] == 1)
        assert pair.prefill.counters["leases_overdue"] == 0
        deadline = time.monotonic() + 10
        while not pair.prefill.counters["leases_overdue"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        pair.until(lambda: forgotten not in pair.prefill.scheduler.requests)
        after = pair.prefill.counters
        assert (after["leases_held"], after["leases_overdue"], after["leases_expired"]) == (0, 0, 1)
