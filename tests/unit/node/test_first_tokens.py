"""What an engine core tells of first tokens before their step is over, on vLLM's own request."""

import queue
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutputs
from vllm.v1.request import Request

from lockstep.node.first_tokens import FirstTokens

PROMPT = list(range(10))


def request(request_id: str, client_index: int = 0, **params: Any) -> Request:
    """One whose prompt is being computed, four of its tokens cached."""
    made = Request(request_id, PROMPT, SamplingParams(**params), None, client_index=client_index)
    made.record_event(EngineCoreEventType.SCHEDULED)
    made.prefill_stats.set(len(PROMPT), 4, 0)
    return made


def core(*requests: Request, **of_scheduler: Any) -> Any:
    """What is read of vLLM's engine core; the names are in the contract tests."""
    scheduler = SimpleNamespace(
        requests={made.request_id: made for made in requests},
        kv_cache_manager=SimpleNamespace(estimate_cached_tokens=lambda request: 8),
        **({"aux_output_connector": None, "return_sampling_mask": False} | of_scheduler),
    )

    def attach(outputs: dict[int, EngineCoreOutputs]) -> None:
        for of_client in outputs.values():
            of_client.weight_version = "v7"

    return SimpleNamespace(scheduler=scheduler, output_queue=queue.Queue(), _attach_weight_version=attach)


def told(engine: Any) -> list[tuple[int, list[tuple[str, list[int]]]]]:
    """By client, the tokens of its requests."""
    found = []
    while not engine.output_queue.empty():
        client_index, outputs = engine.output_queue.get_nowait()
        found.append((client_index, [(o.request_id, o.new_token_ids) for o in outputs.outputs]))
    return found


def test_each_client_gets_its_tokens_in_one_message() -> None:
    """A request that has gone meanwhile is left out, and its token with it."""
    engine = core(request("a"), request("b", 1), request("c"))
    tell = FirstTokens(engine).begin(["a", "gone", "b", "c"])
    assert told(engine) == []
    tell([6, 7, 8, 9])
    assert told(engine) == [(0, [("a", [6]), ("c", [9])]), (1, [("b", [8])])]


def test_the_request_keeps_all_for_the_steps_own_output() -> None:
    """The first output has its events and what was cached; the step's own output has them again."""
    made = request("a")
    engine = core(made)
    FirstTokens(engine).begin(["a"])([6])
    _, outputs = engine.output_queue.get_nowait()
    (output,) = outputs.outputs
    assert [event.type for event in output.events] == [EngineCoreEventType.SCHEDULED]
    assert (output.prefill_stats.num_cached_tokens, output.prefill_stats.num_cache_creation_tokens) == (4, 4)
    assert (output.finish_reason, outputs.weight_version, outputs.timestamp > 0) == (None, "v7", True)
    assert made.take_prefill_stats().num_cached_tokens == 4
    assert made.take_events() == output.events


@pytest.mark.parametrize(
    "params",
    [{"logprobs": 0}, {"logprob_token_ids": [1]}, {"prompt_logprobs": 1}],
    ids=str,
)
def test_token_with_logprobs_waits_for_the_step(params: dict[str, Any]) -> None:
    """They come with the step's outputs only."""
    engine = core(request("a", **params), request("b"))
    FirstTokens(engine).begin(["a", "b"])([6, 7])
    assert told(engine) == [(0, [("b", [7])])]


def test_nothing_is_told_early_where_logits_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's metric of corrupted requests would miss what the first step found."""
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    engine = core(request("a"))
    FirstTokens(engine).begin(["a"])([6])
    assert told(engine) == []


@pytest.mark.parametrize(
    "given", [{"aux_output_connector": object()}, {"return_sampling_mask": True}], ids=str
)
def test_nothing_is_told_early_where_each_token_has_more_to_it(given: dict[str, Any]) -> None:
    """Routed experts and sampling masks, which the engine's flags ask for."""
    engine = core(request("a"), **given)
    FirstTokens(engine).begin(["a"])([6])
    assert told(engine) == []
