"""What a simulated model says."""

from unit.sim.rows_for_tests import EOS, VOICE
from vllm import SamplingParams
from vllm.v1.engine import FinishReason


def said(prompt: list[int], **params: object) -> tuple[list[int], object]:
    """The whole answer, and how it ended."""
    script = VOICE.script(prompt, SamplingParams(**{"max_tokens": 200, **params}))
    tokens: list[int] = []
    while True:
        tokens.append(script.token(len(tokens)))
        end = script.end_after(len(tokens) - 1, script.params.max_tokens)
        if end[0] is not None:
            return tokens, end


def test_the_text_of_the_prompt_over_and_over() -> None:
    """Special tokens of the prompt are no text; the answer ends by the request's limit."""
    tokens, end = said([0, 5, 6, EOS, 7], max_tokens=5)
    assert (tokens, end) == ([5, 6, 7, 5, 6], (FinishReason.LENGTH, None))


def test_it_ends_by_itself() -> None:
    """With the end token, at the place that the simulation was given."""
    tokens, end = said([5])
    assert (len(tokens), tokens[-1], end) == (64, EOS, (FinishReason.STOP, None))


def test_ignore_eos_and_min_tokens_put_the_end_off() -> None:
    """The end token never comes, or not before the number that was asked for."""
    assert said([5], ignore_eos=True, max_tokens=100) == ([5] * 100, (FinishReason.LENGTH, None))
    tokens, end = said([5], min_tokens=70)
    assert (len(tokens), end) == (71, (FinishReason.STOP, None))


def test_a_stop_token_ends_it_and_is_named() -> None:
    """As vLLM's own check says it."""
    assert said([5, 6], stop_token_ids=[6]) == ([5, 6], (FinishReason.STOP, 6))


def test_a_prompt_without_text_has_an_answer() -> None:
    """Of the fallback token."""
    assert said([0], max_tokens=2)[0] == [9, 9]
