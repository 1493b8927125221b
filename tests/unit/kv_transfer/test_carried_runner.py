"""The V1 runner's state of a new request starts with the carried tokens; its batch takes them as output."""

from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.spec_decode import llm_base_proposer
from vllm.v1.worker import gpu_input_batch, gpu_model_runner
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from kv_transfer.carried import runner
from kv_transfer.params import prefill_leg_params

PROMPT = [5, 6, 7]
CARRIED = [8, 9]


@pytest.fixture(autouse=True)
def registered() -> None:
    runner.register()


def state(
    transfer: dict[str, Any] | None, output: list[int] | None = None, **sampling: Any
) -> CachedRequestState:
    """As the runner makes it for a new request (v1/worker/gpu_model_runner.py:1275)."""
    extra = None if transfer is None else {"kv_transfer_params": transfer}
    return CachedRequestState(
        req_id="r",
        prompt_token_ids=PROMPT,
        mm_features=[],
        sampling_params=SamplingParams(extra_args=extra, **sampling),
        generator=None,
        block_ids=([1],),
        num_computed_tokens=0,
        output_token_ids=[] if output is None else output,
    )


def test_a_new_request_starts_with_its_carried_tokens() -> None:
    """Length and single tokens, which the drafter reads in a chunk, are those of prompt and output."""
    carried = state(prefill_leg_params("a" * 32, CARRIED))
    assert carried.output_token_ids == CARRIED
    assert (carried.num_prompt_tokens, carried.num_tokens) == (3, 5)
    assert [carried.get_token_id(i) for i in range(6)] == [5, 6, 7, 8, 9, -1]


@pytest.mark.parametrize("transfer", [None, {}, prefill_leg_params("a" * 32)])
def test_a_first_attempt_starts_empty(transfer: dict[str, Any] | None) -> None:
    assert state(transfer).output_token_ids == []


def test_tokens_of_the_request_are_not_shared_with_its_parameters() -> None:
    """The runner appends to its list; the scheduler's copy of the parameters stays what was sent."""
    transfer = prefill_leg_params("a" * 32, CARRIED)
    state(transfer).output_token_ids.append(-1)
    assert transfer["lockstep_output_token_ids"] == CARRIED


def test_output_that_is_given_is_kept() -> None:
    """Whoever makes a state with output has all of it."""
    assert state(prefill_leg_params("a" * 32, CARRIED), [1]).output_token_ids == [1]


def test_registering_twice_adds_them_once() -> None:
    """vLLM runs general plugins more than once in a process."""
    runner.register()
    assert state(prefill_leg_params("a" * 32, CARRIED)).output_token_ids == CARRIED


def test_batch_takes_them_as_output() -> None:
    """Token ids, penalties (which read the list itself), logits processors and lengths."""
    batch = InputBatch(
        max_num_reqs=2,
        max_model_len=16,
        max_num_batched_tokens=16,
        device=torch.device("cpu"),
        vocab_size=32,
        block_sizes=[16],
        max_num_blocks_per_req=[1],
    )
    carried = state(prefill_leg_params("a" * 32, CARRIED), presence_penalty=1.0)
    batch.add_request(carried)
    added = batch.batch_update_builder.added[0]
    batch.refresh_metadata()
    assert batch.token_ids_cpu[0, :5].tolist() == PROMPT + CARRIED
    assert batch.num_tokens_no_spec[0] == 5
    assert batch.num_prompt_tokens[0] == 3
    assert batch.sampling_metadata.output_token_ids[0] is carried.output_token_ids
    assert batch.sampling_metadata.prompt_token_ids.tolist() == [PROMPT]
    assert added[2:] == (PROMPT, CARRIED)


def test_all_that_import_the_state_have_the_one_that_is_changed() -> None:
    """They import it by name, some before plugins run."""
    changed = gpu_input_batch.CachedRequestState
    assert gpu_model_runner.CachedRequestState is changed
    assert llm_base_proposer.CachedRequestState is changed
