"""A grammar of vLLM's own backend is advanced by carried tokens to the state that generation leaves it in."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from component.kv_transfer.carried_driver import Driver, request, vllm_config
from vllm.config import VllmConfig
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kv_transfer.carried import grammar
from kv_transfer.carried.vllm_schedulers import CarriedSyncScheduler
from kv_transfer.params import prefill_leg_params

REGEX = r"[a-z]{2,6}-[0-9]{3,8}"
TEXT = "lock-1234567"
PROMPT = [40, 41, 42]
EOS = 1
THINK, END = 300, 301
THOUGHTS = [THINK, 500, 501, 502, END]


class Thinking(BaseThinkingReasoningParser):
    """A stock parser over two tokens of pico's vocabulary, which has none for the purpose."""

    start_token = "<start>"
    end_token = "<end>"

    def __init__(self, tokenizer: Any, **_: Any) -> None:
        self.model_tokenizer = tokenizer
        self.start_token_id, self.end_token_id = THINK, END


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return vllm_config()


@pytest.fixture
def driver(config: VllmConfig) -> Iterator[Driver]:
    made = Driver(config, CarriedSyncScheduler)
    yield made
    made.close()


@pytest.fixture(scope="module")
def answer(config: VllmConfig) -> list[int]:
    ids: list[int] = cached_tokenizer_from_config(config.model_config).encode(TEXT, add_special_tokens=False)
    return ids


def constrained(manager: StructuredOutputManager, carried: list[int], request_id: str = "r") -> Request:
    """A request whose grammar has compiled, as the engine's input thread leaves it to the scheduler."""
    params = StructuredOutputsParams(regex=REGEX)
    params._backend = "xgrammar"
    made = request(
        request_id, PROMPT, prefill_leg_params("a" * 32, carried), max_tokens=100, structured_outputs=params
    )
    manager.grammar_init(made)
    assert made.structured_output_request is not None
    made.structured_output_request._grammar.result(timeout=30)  # type: ignore[union-attr]
    return made


def allowed(manager: StructuredOutputManager, made: Request) -> list[bool]:
    """The mask of the next token, as the engine computes it; it is all true where nothing constrains it."""
    row = manager.grammar_bitmask({made.request_id: made}, [made.request_id], {})
    assert row is not None
    bits = torch.from_numpy(row[0].copy()).unsqueeze(-1).bitwise_right_shift(torch.arange(32)) & 1
    return [bool(bit) for bit in bits.flatten().tolist()]


def generated(manager: StructuredOutputManager, tokens: list[int]) -> list[bool]:
    """The mask after `tokens` came out one by one, each accepted as vLLM's scheduler does."""
    made = constrained(manager, [], "generated")
    for token in tokens:
        made.append_output_token_ids(token)
        assert manager.accept_tokens(made, [token])
    return allowed(manager, made)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_next_token_is_constrained_as_while_generating(driver: Driver, answer: list[int], count: int) -> None:
    """After each prefix of the answer."""
    carried = constrained(driver.manager, answer[:count])
    driver.scheduler.add_request(carried)
    scheduled, _ = driver.step(token=answer[count])
    assert scheduled.num_scheduled_tokens == {"r": len(PROMPT) + count}
    assert allowed(driver.manager, carried) == generated(driver.manager, answer[: count + 1])


def test_tokens_are_replayed_once(driver: Driver, answer: list[int]) -> None:
    """Also when the request has to wait after its grammar became ready."""
    carried = constrained(driver.manager, answer[:3])
    driver.scheduler.add_request(carried)
    for _ in range(3):
        assert driver.scheduler._handle_blocked_waiting_request(carried)
    assert allowed(driver.manager, carried) == generated(driver.manager, answer[:3])


def test_replay_waits_for_the_grammar(driver: Driver, answer: list[int]) -> None:
    """It compiles in a thread of its own; until then the request waits."""
    carried = constrained(driver.manager, answer[:3])
    assert carried.structured_output_request is not None
    compiled, carried.structured_output_request._grammar = carried.structured_output_request._grammar, None
    driver.scheduler.add_request(carried)
    scheduled, outputs = driver.step()
    assert (scheduled.num_scheduled_tokens, outputs) == ({}, [])
    carried.structured_output_request._grammar = compiled
    driver.step(token=answer[3])
    assert allowed(driver.manager, carried) == generated(driver.manager, answer[:4])


def test_a_rejected_token_fails_the_request(driver: Driver, answer: list[int]) -> None:
    """It ends with an error at once, is never scheduled, and vLLM does not go on with a wrong grammar."""
    driver.scheduler.add_request(constrained(driver.manager, [*answer[:2], 200]))
    scheduled, outputs = driver.step()
    assert [(output.request_id, str(output.finish_reason)) for output in outputs] == [("r", "error")]
    assert scheduled.num_scheduled_tokens == {}
    assert not driver.scheduler.has_unfinished_requests()


def test_tokens_after_the_end_of_the_grammar_are_ignored(driver: Driver, answer: list[int]) -> None:
    """With ignore_eos a request goes on after its grammar ended; nothing constrains it then."""
    ended = [*answer, EOS, 900, 901]
    carried = constrained(driver.manager, ended)
    driver.scheduler.add_request(carried)
    driver.step(token=902)
    assert all(allowed(driver.manager, carried))
    assert all(generated(driver.manager, [*ended, 902]))


@pytest.mark.parametrize("pieces", [1, 2, grammar.MAX_PIECES])
@pytest.mark.parametrize("content", [0, 1, 4])
def test_reasoning_ends_where_it_ended_while_generating(
    driver: Driver, answer: list[int], monkeypatch: pytest.MonkeyPatch, content: int, pieces: int
) -> None:
    """The grammar begins after the end of reasoning, however the tokens are cut into pieces."""
    monkeypatch.setattr(driver.manager, "reasoner_cls", Thinking)
    monkeypatch.setattr(grammar, "MAX_PIECES", pieces)
    tokens = THOUGHTS + answer[:content]
    carried = constrained(driver.manager, tokens)
    driver.scheduler.add_request(carried)
    assert driver.scheduler._handle_blocked_waiting_request(carried)
    assert allowed(driver.manager, carried) == generated(driver.manager, tokens)
    assert not all(allowed(driver.manager, carried))


def test_open_reasoning_stays_unconstrained(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt broke off among the thoughts: the next token may be any, and the grammar has not begun."""
    monkeypatch.setattr(driver.manager, "reasoner_cls", Thinking)
    carried = constrained(driver.manager, THOUGHTS[:3])
    driver.scheduler.add_request(carried)
    assert driver.scheduler._handle_blocked_waiting_request(carried)
    assert all(allowed(driver.manager, carried))
    assert carried.structured_output_request is not None
    assert carried.structured_output_request.reasoning_ended is False
