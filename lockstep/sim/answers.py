"""What a simulated model says: the text of its prompt over and over, to an end that a request can move."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import FinishReason

End = tuple[FinishReason | None, int | str | None]
"""Finish reason and stop reason; (None, None) where the answer goes on."""

GOES_ON: End = (None, None)


@dataclass(frozen=True, slots=True)
class Script:
    """One answer, the same whichever node gives a token of it, so that a lost or doubled token shows."""

    text: Sequence[int]
    """Never empty."""
    eos_token_id: int | None
    natural_end: int
    """Tokens after which the model ends by itself, the end token included."""
    params: SamplingParams

    def token(self, index: int) -> int:
        """The answer's token at a place from 0."""
        ends = index + 1 >= self.natural_end and index + 1 > (self.params.min_tokens or 0)
        if self.eos_token_id is not None and ends and not self.params.ignore_eos:
            return self.eos_token_id
        return self.text[index % len(self.text)]

    def end_after(self, index: int, max_tokens: int | None) -> End:
        """Whether the answer ends with the token at that place (vllm/v1/core/sched/utils.py::check_stop)."""
        params = self.params
        if index + 1 >= (params.min_tokens or 0):
            token = self.token(index)
            if token == self.eos_token_id and not params.ignore_eos:
                return FinishReason.STOP, None
            if token in (params.stop_token_ids or ()):
                return FinishReason.STOP, token
        if max_tokens is not None and index + 1 >= max_tokens:
            return FinishReason.LENGTH, None
        return GOES_ON


@dataclass(frozen=True, slots=True)
class Voice:
    """What scripts are made of: the model's end token, and the tokens that are no text."""

    eos_token_id: int | None
    special_token_ids: frozenset[int]
    fallback_token_id: int
    """Said to a prompt without any text."""
    natural_end: int

    def script(self, prompt: Sequence[int], params: SamplingParams) -> Script:
        """The answer to a prompt."""
        text = [token for token in prompt if token not in self.special_token_ids]
        return Script(text or [self.fallback_token_id], self.eos_token_id, self.natural_end, params)
