"""A peer's process is stopped, killed or started again under a push between real connectors."""

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from component.kv_transfer.engine_process import EngineProcess, wait_until
from component.kv_transfer.engines import BLOCK_SIZE, Engine
from vllm.v1.request import Request

from kv_transfer.params import PrefillPeer, decode_leg_params, prefill_leg_params

pytestmark = pytest.mark.usefixtures("world")

NUM_BLOCKS = 40
HEAD_SIZE = 2048  # 2 MiB a block: a push takes long enough to be stopped in the middle
TOKEN = "a" * 32
DEADLINE_S = 2.0
WHOLE = {
    "lockstep_stream_chunks": False,
    "lockstep_registration_deadline_s": DEADLINE_S,
    "lockstep_cancel_ack_timeout_s": 0.3,
}
_ids = (f"ls-{number}-0-a1" for number in itertools.count())


@pytest.fixture(scope="module")
def shared_decode(world: None) -> Iterator[Engine]:
    with closing(Engine("decode", NUM_BLOCKS, WHOLE, head_size=HEAD_SIZE)) as engine:
        yield engine


@pytest.fixture(scope="module")
def shared_prefill(world: None) -> Iterator[Engine]:
    with closing(Engine("prefill", NUM_BLOCKS, WHOLE, head_size=HEAD_SIZE)) as engine:
        yield engine


@pytest.fixture
def prefill(shared_prefill: Engine) -> Iterator[Engine]:
    """In this process, as `decode`."""
    yield shared_prefill
    step_until(shared_prefill, lambda: idle(shared_prefill), "prefill is idle again")


@pytest.fixture
def decode(shared_decode: Engine) -> Iterator[Engine]:
    """In this process; without a block in use before or after the test."""
    yield shared_decode
    step_until(shared_decode, lambda: idle(shared_decode), "decode is idle again")


Start = Callable[..., EngineProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts engines in processes of their own."""
    with ExitStack() as stack:

        def started(role: str, **options: Any) -> EngineProcess:
            process = EngineProcess(role, NUM_BLOCKS, WHOLE, head_size=HEAD_SIZE, **options)
            return stack.enter_context(closing(process))

        yield started


def new_prompt(num_blocks: int) -> list[int]:
    """Random, so that nothing of it is in a prefix cache."""
    return random.sample(range(10, 9000), num_blocks * BLOCK_SIZE)


def idle(engine: Engine) -> bool:
    return not (engine.scheduler.has_requests() or engine.kv_usage)


def step_until(engine: Engine, condition: Callable[[], bool], what: str, deadline_s: float = 20.0) -> None:
    def stepped() -> bool:
        engine.step()
        return condition()

    wait_until(stepped, what, deadline_s)


def register(decode: Engine, peer: PrefillPeer, prompt: list[int]) -> Request:
    """The decode leg, with its blocks registered at the prefill engine."""
    request_id = next(_ids)
    request = decode.add(request_id, prompt, decode_leg_params(peer, request_id, TOKEN))
    decode.step()
    return request


def push(prefill: EngineProcess, decode: Engine, num_blocks: int = 3) -> None:
    """A whole request: its KV is right on decode, and both sides are idle again."""
    prompt, before = new_prompt(num_blocks), decode.received
    request = register(decode, prefill.peer, prompt)
    prefill.add(request.request_id, prompt, prefill_leg_params(TOKEN))
    wait_until(lambda: decode.received > before, "the KV arrived")
    assert decode.holds_kv_of(request)
    step_until(decode, lambda: idle(decode), "decode is idle")
    wait_until(lambda: prefill.idle, "prefill is idle")


def blocks_of(engine: Engine, request: Request) -> list[int]:
    return engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]


def clear(engine: Engine) -> None:
    for cache in engine.caches[0].values():
        cache.fill_(-1.0)


def written(engine: Engine, block: int) -> bool:
    """Whether the block has been written, in the layer that goes last, since `clear`."""
    last_layer = list(engine.caches[0].values())[-1]
    return bool((last_layer[block, -1, -1] != -1.0).any())


def stop_in_mid_write(prefill: EngineProcess, decode: Engine) -> Request:
    """Prefill is stopped when the first of a prompt's blocks have been written and the last have not."""
    for _ in range(5):
        clear(decode)
        prompt = new_prompt(20)
        request = register(decode, prefill.peer, prompt)
        blocks = blocks_of(decode, request)
        first = next(iter(decode.caches[0].values()))[blocks[0], 0, 0]
        prefill.add(request.request_id, prompt, prefill_leg_params(TOKEN))
        wait_until(lambda first=first: bool(first[0] != -1.0), "the write has begun")
        prefill.stop()
        if not written(decode, blocks[-1]):
            return request
        prefill.go_on()
        step_until(decode, lambda: idle(decode), "decode is idle")
    raise AssertionError("the write was too fast to be stopped in the middle")


def test_prefill_that_starts_again_at_its_address_is_connected_anew(decode: Engine, start: Start) -> None:
    """Decode, which goes on, takes pushes from the successor of the killed one at once."""
    killed = start("prefill")
    push(killed, decode)
    killed.kill()
    push(start("prefill", port=killed.port), decode)


def test_prefill_frozen_in_mid_write_writes_into_no_reused_block(decode: Engine, start: Start) -> None:
    """SIGSTOP in mid-write: the request fails at its deadline, its blocks are in quarantine, others run
    beside them; after SIGCONT the write ends, prefill acknowledges, and nothing is written any more."""
    prefill = start("prefill")
    frozen = stop_in_mid_write(prefill, decode)
    blocks = blocks_of(decode, frozen)
    step_until(decode, lambda: frozen.request_id in decode.failed, "decode gave up", 2 * DEADLINE_S)
    step_until(decode, lambda: decode.counters["quarantined_blocks"] == len(blocks), "quarantined")
    for _ in range(3):
        other = decode.add(next(_ids), new_prompt(5), {})
        decode.step()
        assert not {*blocks_of(decode, other)} & {*blocks}
        step_until(decode, lambda other=other: other.is_finished(), "a request beside it has run")
    assert decode.counters["quarantined_blocks"] == len(blocks)
    prefill.go_on()
    step_until(decode, lambda: decode.kv_usage == 0, "the quarantine is released")
    assert decode.counters["quarantined_blocks"] == 0
    clear(decode)
    push(prefill, decode)
    late = [block for block in blocks if written(decode, block)]
    assert len(late) <= 3, "only the new push writes"


@pytest.mark.parametrize("gives_up", ["cancel", pytest.param("deadline", marks=pytest.mark.full)])
def test_prefill_killed_before_its_push_is_proven_dead(decode: Engine, start: Start, gives_up: str) -> None:
    """Nobody answers the cancel; that nothing listens at its address any more opens the fence."""
    prefill = start("prefill")
    push(prefill, decode)
    request = register(decode, prefill.peer, new_prompt(3))
    wait_until(lambda: prefill.ask("outstanding"), "it is registered")
    prefill.kill()
    if gives_up == "cancel":
        decode.abort(request.request_id)
    step_until(decode, lambda: decode.kv_usage == 0, "the blocks are back", DEADLINE_S + 4)


@pytest.mark.full
def test_prefill_killed_in_mid_write_is_proven_dead(decode: Engine, start: Start) -> None:
    """A dead process writes nothing: the blocks come back without an answer."""
    prefill = start("prefill")
    request = stop_in_mid_write(prefill, decode)
    prefill.kill()
    step_until(decode, lambda: decode.kv_usage == 0, "the blocks are back", DEADLINE_S + 4)
    assert request.request_id in decode.failed


def push_out(prefill: Engine, decode: EngineProcess, num_blocks: int = 3) -> str:
    """Both legs of a request, the prompt computed; decode's process steps by itself."""
    prompt, request_id = new_prompt(num_blocks), next(_ids)
    decode.add(request_id, prompt, decode_leg_params(prefill.peer, request_id, TOKEN))
    wait_until(lambda: prefill.outstanding, "it is registered")
    prefill.add(request_id, prompt, prefill_leg_params(TOKEN))
    return request_id


def test_decode_that_is_frozen_has_its_kv_when_it_goes_on(prefill: Engine, start: Start) -> None:
    """Prefill neither waits for it in its engine nor holds the blocks any longer than the write takes."""
    decode = start("decode")
    push_out(prefill, decode)
    decode.stop()
    for _ in range(8):
        prefill.step()
    decode.go_on()
    step_until(prefill, lambda: idle(prefill), "prefill has its blocks back", 2 * DEADLINE_S)
    wait_until(lambda: decode.counters["received_requests"] == 1, "the KV arrived")


@pytest.mark.full
def test_decode_killed_under_a_push_and_started_again(prefill: Engine, start: Start) -> None:
    """Prefill has its blocks back without anybody's answer, and pushes to the successor at once."""
    decode = start("decode")
    push_out(prefill, decode, num_blocks=20)
    decode.stop()
    for _ in range(8):
        prefill.step()
    decode.kill()
    step_until(prefill, lambda: idle(prefill), "prefill has its blocks back", 2 * DEADLINE_S)
    successor = start("decode", port=decode.port)
    push_out(prefill, successor)
    step_until(prefill, lambda: idle(prefill), "prefill has pushed")
    wait_until(lambda: successor.counters["received_requests"] == 1, "the KV arrived")


@pytest.mark.parametrize("broken", ["prefill", "decode"])
def test_broken_connection_between_two_that_live_is_made_anew(
    prefill: Engine, decode: Engine, broken: str
) -> None:
    """One side's NIXL has lost the other: one request fails for it at most, the next is pushed."""

    def legs() -> Request:
        prompt = new_prompt(3)
        request = register(decode, prefill.peer, prompt)
        prefill.add(request.request_id, prompt, prefill_leg_params(TOKEN))
        return request

    def pushed(request: Request, before: int) -> bool:
        prefill.step()
        if decode.received == before:
            decode.step()
        return decode.received > before or request.request_id in decode.failed

    before = decode.received
    first = legs()
    wait_until(lambda: pushed(first, before), "the first KV arrived")
    worker: Any = {"prefill": prefill, "decode": decode}[broken].workers[0].connector_worker
    for agents in worker._remote_agents.values():
        for agent in agents.values():
            worker.nixl_wrapper.remove_remote_agent(agent)
    before = decode.received
    second = legs()
    wait_until(lambda: pushed(second, before), "the second arrived or failed", DEADLINE_S)
    step_until(decode, lambda: idle(decode), "decode is idle")
    step_until(prefill, lambda: idle(prefill), "prefill is idle")
    before = decode.received
    third = legs()
    wait_until(lambda: pushed(third, before), "the third arrived", DEADLINE_S)
    assert third.request_id not in decode.failed
    assert decode.holds_kv_of(third)
