"""min_tokens counts known tokens only, on vLLM's own processor and batch."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample import logits_processor, rejection_sampler
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.worker.gpu_input_batch import InputBatch

from decode_node import min_tokens
from decode_node.min_tokens import KnownMinTokens, KnownTokens

EOS = 1
VOCABULARY = 8


def _processor(output: list[int], minimum: int) -> KnownMinTokens:
    """One request with that much output, as the batch adds it."""
    processor = KnownMinTokens(None, torch.device("cpu"), False)
    params = SamplingParams(min_tokens=minimum, max_tokens=20, stop_token_ids=[EOS])
    processor.update_state(BatchUpdate(1, removed=[], added=[(0, params, [5], output)], moved=[]))
    return processor


def _masked_rows(processor: KnownMinTokens, num_drafts: int) -> list[bool]:
    logits = processor.apply_with_spec_decode(torch.zeros(num_drafts, VOCABULARY), [num_drafts])
    return [bool(torch.isneginf(row[EOS])) for row in logits]


def _masks_bonus(processor: KnownMinTokens) -> bool:
    return bool(torch.isneginf(processor.apply(torch.zeros(1, VOCABULARY))[0, EOS]))


def test_known_tokens_leave_placeholders_out() -> None:
    """Those at the end only, and as they are at the time of asking."""
    output = [7, -1, -1]
    known = KnownTokens(output)
    assert (len(known), list(known)) == (1, [7])
    output[1:] = [8]
    assert (len(known), known[-1]) == (2, 8)
    assert len(KnownTokens([-1, -1])) == 0


def test_optimistic_placeholders_do_not_end_the_minimum() -> None:
    """One token is out, two more are only assumed: eos stays masked where the third token would be."""
    output: list[int] = []
    processor = _processor(output, minimum=3)
    output += [7, -1, -1]
    processor.update_state(None)
    output[1:] = []  # put in before sampling: both drafts had been rejected
    assert _masked_rows(processor, 2) == [True, True]
    assert _masks_bonus(processor)


def test_minimum_ends_with_the_right_token() -> None:
    """Two of three are out: the first row of the next step is masked, the second is not."""
    output: list[int] = []
    processor = _processor(output, minimum=3)
    output += [7, 7]
    processor.update_state(None)
    assert _masked_rows(processor, 2) == [True, False]


def test_tokens_put_in_before_sampling_count_at_once() -> None:
    """Placeholders when the step was set up, real ones that reach the minimum when logits are there."""
    output: list[int] = []
    processor = _processor(output, minimum=3)
    output += [-1, -1, -1]
    processor.update_state(None)
    output[:] = [7, 7, 7]
    assert not _masks_bonus(processor)
    assert _masked_rows(processor, 2) == [False, False]


def test_speculation_gets_this_processor() -> None:
    """From vLLM's own builder, as the runner calls it."""
    min_tokens.register()
    config: Any = SimpleNamespace(speculative_config=object())
    built = logits_processor.build_logitsprocs(config, torch.device("cpu"), False, False)
    assert [type(processor) for processor in built.non_argmax_invariant] == [KnownMinTokens]
    assert issubclass(KnownMinTokens, rejection_sampler.MinTokensLogitsProcessor)


@pytest.mark.parametrize(("minimum", "needed"), [(3, True), (0, False)])
def test_real_tokens_are_asked_for_while_a_minimum_is_open(minimum: int, needed: bool) -> None:
    """vLLM puts them in only where something needs them: it costs a wait for the last step."""
    min_tokens.register()
    batch: Any = InputBatch.__new__(InputBatch)
    batch.logitsprocs_need_output_token_ids = False
    batch.logitsprocs = SimpleNamespace(non_argmax_invariant=[_processor([], minimum)])
    assert batch.logitsprocs_need_output_token_ids is needed


def test_batch_reads_what_is_overridden() -> None:
    """InputBatch keeps this attribute, and its sampling metadata asks for it."""
    assert "self.logitsprocs_need_output_token_ids = " in inspect.getsource(InputBatch.__init__)
    assert "self.logitsprocs_need_output_token_ids" in inspect.getsource(InputBatch._make_sampling_metadata)
