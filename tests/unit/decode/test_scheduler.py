"""The decode scheduler by itself: what it hands back and how, what it counts, what it refuses."""

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from simulator.client import Ask, Client
from simulator.engine import Engine
from simulator.receiver import Push
from simulator.shape import Shape
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus

from decode_node.scheduler import LockstepScheduler, LockstepSyncScheduler
from decode_node.scheduler.settings import SchedulerSettings, check_engine
from lockstep.bounce import Bounce
from lockstep.errors import ConfigError


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Driver:
    """One rank and the clients that were added to it; `step` returns all outputs of one engine step."""

    def __init__(self, shape: Shape) -> None:
        self.engine = Engine(shape, 0)
        self.scheduler = self.engine.scheduler
        self._shape = shape
        self._now = 0

    def add(self, name: str = "r", *, carried: tuple[int, ...] = (), **ask: Any) -> Any:
        """The request of a client that has `carried` tokens already; its KV arrives at once by default."""
        push = ask.pop("push", Push(delay=0))
        client = Client(Ask(**ask), name, self._shape)
        request = client.make_request(self._now)
        if carried:
            request.kv_transfer_params["lockstep_output_token_ids"] = list(carried)
        self.engine.add(request, client.conversation, push)
        return request

    def step(self) -> tuple[list[Any], set[str]]:
        """(outputs, ids that are reported as finished)."""
        by_client = self.engine.step(self._now)
        self._now += 1
        finished = [outputs.finished_requests or set() for outputs in by_client.values()]
        return [o for outputs in by_client.values() for o in outputs.outputs], set().union(*finished)

    def step_until(self, request_id: str, num_steps: int = 60) -> list[Any]:
        """The outputs of the step in which the request ended; fails if it does not."""
        for _ in range(num_steps):
            outputs, finished = self.step()
            if any(o.request_id == request_id and o.finish_reason is not None for o in outputs):
                assert request_id in finished, "the end and the load balancer's count come together"
                return [o for o in outputs if o.request_id == request_id]
        raise AssertionError(f"{request_id} has not ended")


def test_bounce_is_an_abort_with_its_reason() -> None:
    """No tokens, finish_reason "abort", the reason as stop_reason; the request is gone then."""
    driver = Driver(Shape())
    request = driver.add(remote=False)
    (output,) = driver.step_until(request.request_id)
    assert (output.new_token_ids, output.finish_reason) == ([], FinishReason.ABORT)
    assert output.stop_reason == "lockstep_local_prefill"
    assert type(output.stop_reason) is str
    assert driver.scheduler.lockstep_counters()["bounced"] == {"lockstep_local_prefill": 1}
    driver.step()
    assert driver.scheduler.requests == {}
    assert not driver.scheduler.has_requests()


@pytest.mark.parametrize(
    "change",
    [
        {"kv_transfer_params": {"do_remote_prefill": False}},
        {"kv_transfer_params": None},
        {"skip_reading_prefix_cache": True},
        {"resumable": True},
        {"mm_features": [object()]},
    ],
)
def test_request_that_cannot_load_its_kv_is_handed_back(change: dict[str, Any]) -> None:
    """Before it takes a block."""
    driver = Driver(Shape())
    client = Client(Ask(), "r", Shape())
    request = client.make_request(0)
    for name, value in change.items():
        setattr(request, name, value)
    driver.scheduler.add_request(request)
    (output,) = driver.step_until(request.request_id)
    assert output.stop_reason == Bounce.LOCAL_PREFILL


def test_kv_that_arrives_short_is_handed_back() -> None:
    """vLLM's own connector loads the prompt only, so carried tokens would have to be computed here."""
    driver = Driver(Shape(connector="stock"))
    request = driver.add(carried=(11, 12))
    assert request.num_tokens == request.num_prompt_tokens + 2
    (output,) = driver.step_until(request.request_id)
    assert output.stop_reason == Bounce.LOCAL_PREFILL


def test_tokens_in_flight_at_a_preemption_are_delivered_before_the_bounce() -> None:
    """Without a connector vLLM preempts a request whose step is still running."""
    driver = Driver(Shape(connector="none", max_model_len=40, spare_blocks=0, max_num_seqs=2))
    first = driver.add("a", prompt_tokens=1, max_tokens=33)
    last = driver.add("b", prompt_tokens=1, max_tokens=33, seed=1)
    tokens, abort = driver.step_until(last.request_id)
    assert tokens.new_token_ids
    assert tokens.finish_reason is None
    assert abort.stop_reason == Bounce.PREEMPTED
    assert first.status == RequestStatus.RUNNING


def test_bounce_gets_out_of_a_paused_engine() -> None:
    """Waiting requests do not count while vLLM is paused (scheduler.py `get_num_unfinished_requests`)."""
    driver = Driver(Shape())
    driver.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    request = driver.add(remote=False)
    assert driver.scheduler.has_requests()
    assert driver.step_until(request.request_id)


def test_new_request_with_an_aborted_ones_id_is_served() -> None:
    """What was noted of the old one does not touch it."""
    driver = Driver(Shape())
    old = driver.add(remote=False)
    driver.engine.abort(old.request_id, late=False)
    new = driver.add(max_tokens=3)
    assert new.request_id == old.request_id
    assert driver.step_until(new.request_id)[-1].finish_reason == FinishReason.LENGTH


def test_acceptance_is_counted_without_placeholders() -> None:
    """The first row of an arrival proposes nothing; later ones propose K = 2."""
    driver = Driver(Shape())
    request = driver.add(max_tokens=20)
    drafts, rows = [], 0
    scheduler = driver.scheduler
    while not request.is_finished():
        by_client = driver.engine.step(len(drafts))
        rows += bool(driver.engine.rows)
        for outputs in by_client.values():
            if outputs.scheduler_stats and outputs.scheduler_stats.spec_decoding_stats:
                drafts.append(outputs.scheduler_stats.spec_decoding_stats.num_draft_tokens)
    assert scheduler.lockstep_counters()["placeholder_drafts"] == 2
    assert set(drafts) == {2}
    # Two rows without a count: the first, and the one in flight when the request ended.
    assert len(drafts) in (rows - 1, rows - 2)


def test_grammar_check_of_drafts_keeps_the_count_of_placeholders() -> None:
    """vLLM replaces the counts by those of rows whose drafts the worker knows (scheduler.py:2606)."""
    driver = Driver(Shape())
    output = SimpleNamespace(num_invalid_spec_tokens={"new": 2}, scheduled_spec_decode_tokens={})
    driver.scheduler.update_draft_token_ids_in_output(DraftTokenIds([], []), output)
    assert output.num_invalid_spec_tokens == {"new": 2}


def test_strict_ends_the_engine_at_the_first_odd_row() -> None:
    driver = Driver(Shape(arrival_padding=False, strict=True))
    driver.add()
    driver.step()  # registers its blocks
    driver.step()  # learns that the KV has arrived
    with pytest.raises(RuntimeError, match="3 tokens wide: unpadded_arrival"):
        driver.step()


def test_odd_rows_are_counted_and_logged_once_a_cause(caplog: pytest.LogCaptureFixture) -> None:
    logging.disable(logging.NOTSET)
    logging.getLogger("vllm").addHandler(caplog.handler)
    driver = Driver(Shape(arrival_padding=False, strict=False))
    for name in ("a", "b"):
        driver.step_until(driver.add(name, max_tokens=3).request_id)
    logging.getLogger("vllm").removeHandler(caplog.handler)
    assert driver.scheduler.lockstep_counters()["violations"] == {"unpadded_arrival": 2}
    assert len([r for r in caplog.records if "unpadded_arrival" in r.getMessage()]) == 1


@pytest.mark.parametrize("value", [{"strict": 1}, {"other": True}, {"arrival_padding": "off"}])
def test_settings_are_checked(value: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"--additional-config: lockstep\."):
        SchedulerSettings.from_config(SimpleNamespace(additional_config={"lockstep": value}))


def test_settings_may_be_absent() -> None:
    """Under a plain vLLM server: padding on, not strict."""
    found = SchedulerSettings.from_config(SimpleNamespace(additional_config={}))
    assert found == SchedulerSettings(strict=False, arrival_padding=True)


def test_class_has_to_fit_the_scheduling_mode() -> None:
    """A plain subclass under asynchronous scheduling would run without drafts."""
    for shape, scheduler_cls, right in (
        (Shape(asynchronous=True), LockstepSyncScheduler, "LockstepScheduler"),
        (Shape(asynchronous=False), LockstepScheduler, "LockstepSyncScheduler"),
    ):
        scheduler = shape.make_scheduler(0)
        with pytest.raises(ConfigError, match=rf"--scheduler-cls: give decode_node\.scheduler\.{right} "):
            check_engine(scheduler, asynchronous=scheduler_cls is LockstepScheduler, served_context_limit=20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_pp": True}, "--pipeline-parallel-size"),
        ({"dynamic_sd_lookup": [1]}, "num_speculative_tokens_per_batch_size"),
        ({"num_prefill_lookahead": 2}, "several MTP modules"),
        ({"need_mamba_block_aligned_split": True}, "--mamba-cache-mode"),
        ({"max_num_scheduled_tokens": 11}, "--max-num-scheduled-tokens: must be at least 12"),
        ({"max_num_running_reqs": 5}, "--max-num-batched-tokens: must be at least 15"),
        ({"cache_config": SimpleNamespace(num_gpu_blocks=8)}, "--max-model-len: .*at most 20"),
    ],
)
def test_engine_that_cannot_keep_the_width_is_refused(change: dict[str, Any], message: str) -> None:
    """Four sequences of 1 + 2 tokens, 43 tokens served, blocks of 4, 2 of them for a step."""
    scheduler = Shape().make_scheduler(0)
    for name, value in change.items():
        setattr(scheduler, name, value)
    with pytest.raises(ConfigError, match=message):
        check_engine(scheduler, asynchronous=True, served_context_limit=43)


def test_failed_loads_go_back_whatever_the_policy() -> None:
    """kv_load_failure_policy "recompute" would compute the prompt on this rank."""
    driver = Driver(Shape())
    assert driver.scheduler.recompute_kv_load_failures is False
    request = driver.add(push=Push(outcome="fail", delay=0))
    (output,) = driver.step_until(request.request_id)
    assert output.stop_reason == Bounce.KV_LOAD_FAILED


def test_max_tokens_ends_at_the_served_limit() -> None:
    driver = Driver(dataclasses.replace(Shape(), max_model_len=48))
    assert driver.add(prompt_tokens=10, max_tokens=1000).max_tokens == 43 - 10
    assert driver.add("s", prompt_tokens=10, max_tokens=20).max_tokens == 20


def first_decode_outputs(driver: Driver, request: Any) -> list[Any]:
    for _ in range(20):
        outputs, _ = driver.step()
        if outputs:
            return [output for output in outputs if output.request_id == request.request_id]
    raise AssertionError("no output")


@pytest.mark.parametrize("asynchronous", [True, False])
def test_goes_on_from_the_token_that_was_handed_over(asynchronous: bool) -> None:
    """Its first step verifies prefill's drafts and gives what follows; nothing of the prompt is computed."""
    shape = Shape(asynchronous=asynchronous)
    driver = Driver(shape)
    seed = next(seed for seed in range(50) if _num_right(seed, shape) == shape.num_speculative_tokens)
    request = driver.add(hand_off=True, seed=seed)
    (output,) = first_decode_outputs(driver, request)
    truth = Client(Ask(seed=seed), "r", shape).conversation
    assert output.new_token_ids == [truth.token(i) for i in (1, 2, 3)]
    assert request.output_token_ids[:4] == [truth.token(i) for i in range(4)]
    assert (output.prefill_stats.num_computed_tokens, request.num_prompt_tokens) == (0, 10)
    counters = driver.scheduler.lockstep_counters()
    assert (counters["hand_offs"], counters["handed_over_drafts"], counters["padded_arrivals"]) == (1, 2, 0)


def _num_right(seed: int, shape: Shape) -> int:
    truth = Client(Ask(seed=seed), "r", shape).conversation
    return sum(draft == truth.token(1 + i) for i, draft in enumerate(truth.drafts(1)))


@pytest.mark.parametrize(
    ("ask", "reason"), [({"max_tokens": 1}, FinishReason.LENGTH), ({"stop_at": 0}, FinishReason.STOP)]
)
def test_request_that_ends_with_the_handed_over_token(ask: dict[str, Any], reason: FinishReason) -> None:
    """It ends by vLLM's rule, without tokens, and without a row."""
    driver = Driver(Shape())
    request = driver.add(hand_off=True, **ask)
    (output,) = driver.step_until(request.request_id)
    assert (output.new_token_ids, output.finish_reason) == ([], reason)
    driver.step()
    assert driver.engine.worker.states == driver.scheduler.requests == {}


@pytest.mark.parametrize("payload", [b"", b"\x09rubbish"])
def test_promised_and_missing_is_a_failed_load(payload: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token that the client may have had cannot be sampled again."""
    driver = Driver(Shape())
    request = driver.add(hand_off=True)
    connector = driver.scheduler.connector.connector_scheduler
    monkeypatch.setattr(connector, "take_hand_off", lambda request_id: payload)
    (output,) = driver.step_until(request.request_id)
    assert output.stop_reason == Bounce.KV_LOAD_FAILED
    assert driver.scheduler.lockstep_counters()["hand_offs"] == 0


def test_drafts_that_the_grammar_forbids_are_placeholders() -> None:
    """The row keeps its width; the allowed ones before them are verified."""
    driver = Driver(Shape())
    shape = driver.engine.shape
    seed = next(seed for seed in range(50) if _num_right(seed, shape) == 1)
    client = Client(Ask(hand_off=True, seed=seed, grammar_delay=0), "r", shape)
    request = client.make_request(0)
    client.compile_grammar()
    driver.engine.add(request, client.conversation, Push(delay=0))
    assert len(first_decode_outputs(driver, request)[0].new_token_ids) == 2
    counters = driver.scheduler.lockstep_counters()
    assert (counters["handed_over_drafts"], counters["padded_arrivals"]) == (1, 1)
