"""The truth of a simulation: which tokens each conversation has, and which of its drafts are right."""

import random
from dataclasses import dataclass, field

STOP = 9
"""The token at which a conversation stops."""
WRONG = 7
"""A draft that is never right."""
_FIRST = 10


@dataclass(slots=True)
class Conversation:
    """What one client asked for; token i of its output is `token(i)` on every rank and in every attempt.

    Attributes:
        prompt: token ids; conversations may share prefixes.
        stop_at: index of the output token that is STOP, or None.
        seed: decides tokens and how many of the drafts after each token are right.
    """

    name: str
    prompt: list[int]
    seed: int
    num_speculative_tokens: int
    stop_at: int | None = None
    _tokens: list[int] = field(default_factory=list)
    _chain: list[int] = field(default_factory=list)

    def token(self, index: int) -> int:
        """Output token `index`, at least 0."""
        while len(self._tokens) <= index:
            at = len(self._tokens)
            drawn = random.Random(self.seed * 1009 + at).randrange(_FIRST, 2000)
            self._tokens.append(STOP if at == self.stop_at else drawn)
        return self._tokens[index]

    def at(self, position: int) -> int:
        """The token at a position of prompt and output."""
        return (
            self.prompt[position] if position < len(self.prompt) else self.token(position - len(self.prompt))
        )

    def drafts(self, index: int) -> list[int]:
        """What the draft model proposes for output tokens `index` and on: some right, then wrong ones."""
        right = random.Random(self.seed * 2003 + index).randrange(self.num_speculative_tokens + 1)
        return [self.token(index + i) if i < right else WRONG for i in range(self.num_speculative_tokens)]

    def kv(self, position: int) -> int:
        """What the KV cache holds at a position: it depends on all tokens up to there."""
        while len(self._chain) <= position:
            before = self._chain[-1] if self._chain else 0
            self._chain.append(hash((before, self.at(len(self._chain)))))
        return self._chain[position]


class Grammar:
    """Stands for a compiled grammar that allows exactly the conversation's tokens."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._num_accepted = 0

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        expected = [self._conversation.token(self._num_accepted + i) for i in range(len(tokens))]
        self._num_accepted += len(tokens)
        return tokens == expected

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        valid = []
        for index, token in enumerate(tokens, self._num_accepted):
            if token != self._conversation.token(index):
                break
            valid.append(token)
        return valid
