"""Carried tokens inside vLLM's real scheduler, with and without our connector."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from component.kv_transfer.carried_driver import (
    BLOCK_SIZE,
    BUDGET,
    MAX_MODEL_LEN,
    Driver,
    request,
    vllm_config,
)
from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kv_transfer.carried.vllm_schedulers import (
    SCHEDULER,
    CarriedAsyncScheduler,
    CarriedSyncScheduler,
    make_scheduler,
)
from kv_transfer.config import kv_transfer_config
from kv_transfer.params import PrefillPeer, decode_leg_params, prefill_leg_params

RID = "ls-1-0-a2"
TOKEN = "a" * 32
PEER = PrefillPeer("p0", "127.0.0.1", 5600, 1)
PROMPT = list(range(10, 50))  # 40 tokens: 3 blocks
CARRIED = list(range(100, 110))  # up to 50 tokens: 4 blocks

MakeDriver = Callable[..., Driver]


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return vllm_config()


@pytest.fixture
def make(config: VllmConfig) -> Iterator[MakeDriver]:
    """Makes a driver, of a role with our connector or of none, and closes it afterwards."""
    made: list[Driver] = []

    def driver(role: Any = None, scheduler_class: type[Scheduler] = CarriedSyncScheduler) -> Driver:
        config.kv_transfer_config = None
        if role is not None:
            transfer = kv_transfer_config(role, kv_buffer_device="cpu", engine_id=f"{role}-engine")
            config.kv_transfer_config = KVTransferConfig(**transfer)
        made.append(Driver(config, scheduler_class))
        return made[-1]

    yield driver
    for one in made:
        one.close()


def carried_request(carried: list[int] = CARRIED, request_id: str = RID, **sampling: Any) -> Any:
    transfer = prefill_leg_params(TOKEN, carried)
    return request(request_id, PROMPT, transfer, **{"max_tokens": 100} | sampling)


def test_carried_tokens_are_output_tokens(make: MakeDriver) -> None:
    """They count as output from the start; blocks are hashed over prompt and output, as in generation."""
    carried = carried_request()
    make().scheduler.add_request(carried)
    plain = request("plain", PROMPT + CARRIED, None, max_tokens=1)
    assert list(carried.output_token_ids) == CARRIED
    assert (carried.num_prompt_tokens, carried.num_tokens) == (40, 50)
    assert carried.block_hashes == plain.block_hashes
    assert len(carried.block_hashes) == 50 // BLOCK_SIZE


@pytest.mark.parametrize("scheduler_class", [CarriedSyncScheduler, CarriedAsyncScheduler])
def test_prompt_and_carried_tokens_are_computed_before_the_next_token(
    make: MakeDriver, scheduler_class: type[Scheduler]
) -> None:
    """In chunks of the budget, without output; then only the new tokens come out."""
    driver = make(scheduler_class=scheduler_class)
    driver.scheduler.add_request(carried_request(max_tokens=len(CARRIED) + 2))
    widths, tokens, finish = [], [], []
    for _ in range(4):
        scheduled, outputs = driver.step(token=7)
        widths.append(scheduled.num_scheduled_tokens[RID])
        tokens += [token for output in outputs for token in output.new_token_ids]
        finish += [str(output.finish_reason) for output in outputs if output.finish_reason is not None]
        if finish:
            break
    assert widths == [BUDGET, len(PROMPT) + len(CARRIED) - BUDGET, 1]
    assert tokens == [7, 7]
    assert finish == ["length"]
    assert not driver.scheduler.has_unfinished_requests()


def test_cached_blocks_past_the_prompt_are_used(make: MakeDriver) -> None:
    """A second attempt on the same engine computes only what the first left out of full blocks."""
    driver = make()
    first = request("first", PROMPT, None, max_tokens=30)
    driver.scheduler.add_request(first)
    while driver.scheduler.has_unfinished_requests():
        driver.step(token=9)
    second = carried_request(
        [9] * 24
    )  # 64 tokens: 4 blocks, of which the last is not a hit (vLLM computes one)
    driver.scheduler.add_request(second)
    scheduled, _ = driver.step()
    assert scheduled.num_scheduled_tokens == {RID: BLOCK_SIZE}
    assert scheduled.scheduled_new_reqs[0].num_computed_tokens == 48


def test_a_preempted_request_goes_on_with_carried_and_new_tokens(make: MakeDriver) -> None:
    """The worker gets both back as output, as vLLM sends those of any preempted request."""
    driver = make()
    carried = carried_request()
    driver.scheduler.add_request(carried)
    for _ in range(3):
        driver.step(token=7)
    assert list(carried.output_token_ids) == [*CARRIED, 7, 7]
    driver.scheduler.running.remove(carried)
    driver.scheduler._preempt_request(carried, 0.0)
    scheduled, _ = driver.step()
    resumed = scheduled.scheduled_cached_reqs
    assert resumed.resumed_req_ids == {RID}
    assert resumed.num_output_tokens == [len(CARRIED) + 2]
    assert resumed.all_token_ids == {RID: [*PROMPT, *CARRIED, 7, 7]} or not resumed.all_token_ids


@pytest.mark.parametrize(
    ("carried", "sampling"),
    [
        ([1, 2], {"max_tokens": 2}),
        ([1, 2], {"prompt_logprobs": 1}),
        ([1] * (MAX_MODEL_LEN - 40), {"max_tokens": MAX_MODEL_LEN}),
        ([2048], {}),
        ([-1], {}),
        ("ab", {}),
    ],
)
def test_what_cannot_continue_fails_alone(make: MakeDriver, carried: Any, sampling: dict[str, Any]) -> None:
    """It ends with an error in the next step, never reaches a worker, and its neighbour goes on."""
    driver = make()
    bad = carried_request([1], **sampling)
    bad.kv_transfer_params["lockstep_output_token_ids"] = carried
    driver.scheduler.add_request(bad)
    driver.scheduler.add_request(request("other", PROMPT, None, max_tokens=5))
    scheduled, outputs = driver.step()
    assert [(output.request_id, str(output.finish_reason)) for output in outputs] == [(RID, "error")]
    assert list(scheduled.num_scheduled_tokens) == ["other"]
    assert RID not in driver.scheduler.requests


def test_decode_waits_for_the_kv_of_prompt_and_carried_tokens(make: MakeDriver) -> None:
    """It registers blocks for all of them, and computes only the last token itself once they came."""
    driver = make("decode")
    transfer = decode_leg_params(PEER, RID, TOKEN, CARRIED)
    driver.scheduler.add_request(request(RID, PROMPT, transfer, max_tokens=100))
    scheduled, _ = driver.step()
    registered = scheduled.kv_connector_metadata.push_registrations[RID]["local_block_ids"]
    assert [len(group) for group in registered] == [4]
    driver.step(report=KVConnectorOutput(finished_recving={RID}))
    scheduled, outputs = driver.step(token=7)
    assert scheduled.num_scheduled_tokens == {RID: 1}
    assert scheduled.scheduled_new_reqs[0].num_computed_tokens == 49
    assert [list(output.new_token_ids) for output in outputs] == [[7]]


def test_decode_asks_only_for_what_it_has_not_cached(make: MakeDriver) -> None:
    """Blocks of an earlier attempt on this rank, past the prompt too, are not sent again."""
    driver = make("decode")
    first = decode_leg_params(PEER, "ls-1-0-a1", TOKEN)
    driver.scheduler.add_request(request("ls-1-0-a1", PROMPT, first, max_tokens=20))
    driver.step()
    driver.step(report=KVConnectorOutput(finished_recving={"ls-1-0-a1"}))
    while driver.scheduler.requests["ls-1-0-a1"].num_output_tokens < 19:
        driver.step(token=9)
    driver.scheduler.finish_requests("ls-1-0-a1", RequestStatus.FINISHED_ABORTED)
    second = decode_leg_params(PEER, RID, TOKEN, [9] * 19)
    driver.scheduler.add_request(request(RID, PROMPT, second, max_tokens=100))
    scheduled, _ = driver.step()
    registered = scheduled.kv_connector_metadata.push_registrations[RID]["local_block_ids"]
    assert [len(group) for group in registered] == [1]  # of 59 tokens in 4 blocks, 3 full ones are here


def test_prefill_pushes_the_blocks_of_prompt_and_carried_tokens(make: MakeDriver) -> None:
    """And gives out one token, which ends the leg by its length."""
    driver = make("prefill", CarriedAsyncScheduler)
    driver.scheduler.add_request(carried_request(max_tokens=len(CARRIED) + 1))
    driver.step()
    _, outputs = driver.step(token=5)
    assert [(list(o.new_token_ids), str(o.finish_reason)) for o in outputs] == [([5], "length")]
    scheduled, _ = driver.step()
    pushed = scheduled.kv_connector_metadata.push_finished_blocks[RID]
    assert [len(group) for group in pushed] == [4]


@pytest.mark.parametrize(
    ("asynchronous", "expected"), [(True, CarriedAsyncScheduler), (False, CarriedSyncScheduler)]
)
def test_prefill_scheduler_fits_async_scheduling(
    monkeypatch: pytest.MonkeyPatch, config: VllmConfig, asynchronous: bool, expected: type[Scheduler]
) -> None:
    """As vLLM's own choice does, from what it resolved and not from the flag alone."""
    monkeypatch.setattr(config.scheduler_config, "async_scheduling", asynchronous)
    monkeypatch.setattr(config.scheduler_config, "scheduler_cls", SCHEDULER)
    config.kv_transfer_config = None
    assert config.scheduler_config.get_scheduler_cls() is make_scheduler
    driver = Driver(config, make_scheduler)  # type: ignore[arg-type]
    assert type(driver.scheduler) is expected
    assert isinstance(driver.scheduler, AsyncScheduler) is asynchronous
    driver.close()
