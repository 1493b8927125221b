"""What one leg of a fake node is and does: its place in time, its answer, and what would be wrong with it."""

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from lockstep.bounce import Bounce
from lockstep.errors import InvalidRequestError, LockstepError

CLOCK_SKEW_S = 5000.0
"""The node's monotonic clock is that far ahead: nothing of it may reach a client."""

CACHED_TOKENS = 3
PROMPT_LOGPROB = -0.25
CONTEXT_LIMIT = 256
EOS_TOKEN_ID = 1
NOT_FOR_CLIENTS = 2
TOKENS_A_STEP = 3

Push = tuple[str, str, str]
"""engine id, request id, token"""


class Wire:
    """Stands for NIXL: what was pushed, and the tokens whose KV that is."""

    def __init__(self) -> None:
        self.pushed: defaultdict[Push, asyncio.Event] = defaultdict(asyncio.Event)
        self.announced: defaultdict[str, set[str]] = defaultdict(set)
        """The decode engines that a prefill engine writes to."""
        self.tokens: dict[Push, tuple[list[int], tuple[int, ...], bool]] = {}

    def check(self, push: Push, request: EngineCoreRequest, carried: tuple[int, ...], hand_off: bool) -> None:
        """Both legs are of the same prompt and the same tokens after it, whichever comes first."""
        tokens = (list(request.prompt_token_ids or ()), carried, hand_off)
        if self.tokens.setdefault(push, tokens) != tokens:
            raise InvalidRequestError("the legs differ in their tokens")


@dataclass
class Leg:
    """An accepted request."""

    request: EngineCoreRequest
    rank: int
    carried: tuple[int, ...] = ()
    hand_off: bool = False
    task: asyncio.Task[None] | None = None


@dataclass
class Behaviour:
    """What a test sets; it is read anew for each request and step."""

    delay_s: float = 0.0
    step_s: float = 0.001
    fail_first: int = 0
    fail_with: LockstepError = field(default_factory=lambda: InvalidRequestError("set by the test"))
    finish_with: FinishReason | None = None
    """How every leg ends."""
    ends: list[tuple[int, FinishReason | Bounce]] = field(default_factory=list)
    """How the next legs end, one each: after at least so many new tokens, and with what."""
    ignores_aborts: bool = False
    pause_after_tokens: int | None = None
    """On prefill 1 is after its token was told, and before its leg ends."""
    tells_early: bool = True
    """Prefill tells its token before its leg ends, where that is all that the first output says."""
    go: asyncio.Event = field(default_factory=asyncio.Event)
    ready: bool = True
    status_never: bool = False


def check_tokens(role: Literal["prefill", "decode"], leg: Leg) -> None:
    """Refuse what would go wrong on the real node, where the carried tokens are output tokens."""
    params, carried = leg.request.sampling_params, leg.carried
    assert params is not None
    assert params.max_tokens is not None
    if params.min_tokens > params.max_tokens:
        raise InvalidRequestError("min_tokens exceeds max_tokens")
    if carried and carried != tuple(answer_to(leg.request)[: len(carried)]):
        raise InvalidRequestError("the carried tokens are not the beginning of the answer")
    if role == "prefill":
        if params.max_tokens != len(carried) + 1:
            raise InvalidRequestError("the prefill leg is not of one new token")
        if carried and params.prompt_logprobs is not None:
            raise InvalidRequestError("prompt logprobs went out before")
        return
    if len(carried) >= params.max_tokens:
        raise InvalidRequestError("nothing is left to generate")
    if params.prompt_logprobs is not None or params.skip_reading_prefix_cache:
        raise InvalidRequestError("decode would compute the prompt again")


def first_events() -> list[EngineCoreEvent]:
    now = time.monotonic() + CLOCK_SKEW_S
    return [
        EngineCoreEvent(EngineCoreEventType.QUEUED, now),
        EngineCoreEvent(EngineCoreEventType.SCHEDULED, now),
    ]


def answer_to(request: EngineCoreRequest) -> list[int]:
    """The prompt again, and the end."""
    assert request.sampling_params is not None
    return [*(request.prompt_token_ids or ()), EOS_TOKEN_ID][: request.sampling_params.max_tokens]


def end_with(output: EngineCoreOutput, end: FinishReason | Bounce) -> None:
    """As the decode scheduler hands a request back, or as vLLM ends one; without the tokens."""
    output.new_token_ids = []
    if isinstance(end, Bounce):
        output.finish_reason, output.stop_reason = FinishReason.ABORT, str(end)
    else:
        output.finish_reason = end


def logprobs(tokens: list[int], params: SamplingParams | None) -> LogprobsLists | None:
    """Of the tokens sampled in one step: each of them first, then as many more as were asked for."""
    if params is None or params.logprobs is None:
        return None
    others = list(params.logprob_token_ids or range(max(params.logprobs, 0)))
    ids = np.array([[token, *others] for token in tokens], dtype=np.int64).reshape(len(tokens), -1)
    values = np.full(ids.shape, PROMPT_LOGPROB, dtype=np.float32)
    return LogprobsLists(ids, values, np.ones(len(tokens), dtype=np.int64))


def prompt_logprobs(prompt: list[int], wanted: int | None) -> LogprobsTensors | None:
    """As the V1 runner gives them: each prompt token but the first, with as many best ones."""
    if wanted is None:
        return None
    import torch

    rows, columns = len(prompt) - 1, wanted + 1
    ids = torch.tensor(np.tile(np.array(prompt[1:], dtype=np.int32)[:, None], (1, columns)))
    return LogprobsTensors(
        ids, torch.full((rows, columns), PROMPT_LOGPROB), torch.ones(rows, dtype=torch.int32)
    )
