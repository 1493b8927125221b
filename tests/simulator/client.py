"""What clients ask of a group, and the proxy's part of it: attempts that continue after a bounce."""

from dataclasses import dataclass, field
from typing import Any

from simulator.model import STOP, Conversation, Grammar
from simulator.receiver import Push
from simulator.shape import BLOCK_SIZE, Shape
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request

from kv_transfer.params import PrefillPeer, decode_leg_params
from lockstep.bounce import Bounce

PEER = PrefillPeer("prefill-0", "127.0.0.1", 5600, 1)
TOKEN = "a" * 32


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a client.

    Attributes:
        at: the step before which it arrives.
        family: requests of one family have prompts with a common beginning.
        stop_at: index of the output token that ends it, if max_tokens does not before.
        pushes: what prefill does in the first attempts; in later ones it pushes without fail.
        abort_at: the step before which the client goes away; `late`: while that step runs.
        grammar_delay: steps until its grammar is compiled, if it has one.
        remote: whether the first attempt has its KV computed by prefill.
        hand_off: prefill's first token reaches the client when an attempt begins, and decode goes on from it.
        priority: the lower, the sooner, where the policy asks for it.
    """

    at: int = 0
    rank: int = 0
    prompt_tokens: int = 10
    family: int = 0
    max_tokens: int = 8
    stop_at: int | None = None
    seed: int = 0
    pushes: tuple[Push, ...] = ()
    abort_at: int | None = None
    late: bool = False
    grammar_delay: int | None = None
    remote: bool = True
    client: int = 0
    priority: int = 0
    hand_off: bool = False


@dataclass(slots=True)
class Client:
    """Follows one `Ask` to its end and checks every output of it."""

    ask: Ask
    name: str
    shape: Shape
    conversation: Conversation = field(init=False)
    output: list[int] = field(default_factory=list)
    bounces: list[Bounce] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    submit_at: int | None = None
    grammar_at: int | None = None
    request: Request | None = None

    def __post_init__(self) -> None:
        prompt = [10 + (self.ask.family * 611 + i * 37) % 1900 for i in range(self.ask.prompt_tokens)]
        self.conversation = Conversation(
            self.name, prompt, self.ask.seed, self.shape.num_speculative_tokens, self.ask.stop_at
        )
        self.submit_at = self.ask.at

    @property
    def expected_output(self) -> list[int]:
        is_ours = self.shape.scheduler == "lockstep"
        limit = self.shape.context_limit if is_ours else self.shape.max_model_len
        length = min(self.ask.max_tokens, limit - self.ask.prompt_tokens)
        if self.ask.stop_at is not None:
            length = min(length, self.ask.stop_at + 1)
        return [self.conversation.token(i) for i in range(max(length, 0))]

    @property
    def expected_end(self) -> FinishReason:
        """Of an answer that has a token."""
        return FinishReason.STOP if self.expected_output[-1] == STOP else FinishReason.LENGTH

    @property
    def attempt(self) -> int:
        return len(self.bounces)

    @property
    def rank(self) -> int:
        return (self.ask.rank + self.attempt) % 2

    @property
    def push(self) -> Push:
        return self.ask.pushes[self.attempt] if self.attempt < len(self.ask.pushes) else Push()

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None

    def make_request(self, now: int) -> Request:
        """The next attempt's decode leg: the same prompt, with what was generated so far.

        vLLM's own connector knows nothing of that, so a caller of a plain server sends a longer prompt.
        """
        request_id = f"{self.name}-a{self.attempt}"
        is_ours = self.shape.connector == "lockstep"
        is_remote = self.ask.remote or self.attempt > 0
        takes_over = is_ours and is_remote and self.shape.scheduler == "lockstep"
        hand_off = self.ask.hand_off and takes_over and self.output != self.expected_output
        params = decode_leg_params(PEER, request_id, TOKEN, self.output if is_ours else (), hand_off=hand_off)
        params["do_remote_prefill"] = is_remote
        has_grammar = self.ask.grammar_delay is not None
        self.request = Request(
            request_id=request_id,
            prompt_token_ids=self.conversation.prompt + ([] if is_ours else self.output),
            sampling_params=SamplingParams(
                max_tokens=self.ask.max_tokens - (0 if is_ours else len(self.output)),
                stop_token_ids=[STOP],
                structured_outputs=StructuredOutputsParams(regex=".*") if has_grammar else None,
                extra_args={"kv_transfer_params": params},
            ),
            pooling_params=None,
            client_index=self.ask.client,
            priority=self.ask.priority,
            arrival_time=float(now),
            block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        )
        if hand_off:
            self.output.append(self.conversation.token(len(self.output)))
        self.submit_at = None
        self.grammar_at = now + self.ask.grammar_delay if has_grammar else None
        return self.request

    def compile_grammar(self) -> None:
        assert self.request is not None
        self.grammar_at = None
        self.request.structured_output_request.grammar = Grammar(self.conversation)

    def take(self, output: Any, now: int) -> None:
        """One `EngineCoreOutput` of the current attempt."""
        assert not self.is_done, f"{self.name}: output after its end"
        have, new = len(self.output), output.new_token_ids
        expected = [self.conversation.token(have + i) for i in range(len(new))]
        assert new == expected, f"{self.name}: got {new} after {have} tokens, not {expected}"
        self.output += new
        if output.finish_reason == FinishReason.ABORT and output.stop_reason != Bounce.CONTEXT_LIMIT:
            self.bounces.append(Bounce(output.stop_reason))
            assert not new
            if self.output == self.expected_output:  # it ended with a handed-over token
                self.finish_reason = self.expected_end
            else:
                self.submit_at = now + 2
        else:
            self.finish_reason = output.finish_reason

    def leave(self) -> None:
        """The client went away."""
        self.finish_reason = FinishReason.ABORT
        self.submit_at = self.grammar_at = None

    def check_end(self, *, left: bool) -> None:
        """Every token once, and the right end."""
        expected = self.expected_output
        # vLLM itself ends a request whose load has failed.
        if left or (self.finish_reason == FinishReason.ERROR and self.shape.scheduler == "stock"):
            assert self.output == expected[: len(self.output)]
            return
        assert self.output == expected, f"{self.name}: {self.output} is not {expected}"
        if not expected:
            assert self.finish_reason == FinishReason.ABORT  # no room for any token
        else:
            assert self.finish_reason == self.expected_end
