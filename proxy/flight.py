"""One choice of a client's request: its attempts, and what its one stream has been given so far."""

import time
from dataclasses import dataclass, field

from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreRequest

from proxy.admission.accounts import Account
from proxy.attempt import Attempt
from proxy.attempt_end import AttemptEnd
from proxy.hand_off import end_of
from proxy.ids import leg_id
from proxy.metrics import AttemptReason
from proxy.nodes import Role
from proxy.outlet import Outlet
from proxy.routing import Asked, RankKey, RankLoad
from proxy.tracing import attempt_spans
from proxy.tracing.attempt_spans import AttemptSpans


@dataclass(slots=True, eq=False)
class Flight:
    """From `add_request_async` to the end that the client sees, over as many attempts as it takes.

    `front_id` is vLLM's internal id, unique however often a client repeats its X-Request-Id; `choice_id` is
    ours, and begins the ids of all its legs. Times are `time.monotonic` of the proxy.
    """

    front_id: str
    request: EngineCoreRequest
    choice_id: str
    prompt_tokens: int
    outlet: Outlet
    """The front end that it came from."""
    attempts: list[Attempt] = field(default_factory=list)
    attempt: Attempt | None = None
    """The live one; None while the choice waits to be sent."""
    hedge: Attempt | None = None
    """A second live one, until one of the two has computed the prompt."""
    next_reason: AttemptReason = AttemptReason.FIRST
    output_token_ids: list[int] = field(default_factory=list)
    """All that were passed on to the front end; the next attempt goes on after them."""
    failed_at: dict[RankKey, int] = field(default_factory=dict)
    """Ranks that an attempt failed on, with the number of the last such attempt."""
    queued_s: float = field(default_factory=time.monotonic)
    arrived_s: float = field(init=False)
    """Before `queued_s` by what tokenizing took; vLLM notes the arrival on the wall clock."""
    first_token_s: float = 0.0
    stalled_s: float | None = None
    """Since when an ended attempt keeps the stream waiting."""
    account: Account | None = None
    """Whose tokens it uses."""
    session: str | None = None
    """By the client's X-Session-ID."""
    asked: Asked | None = None
    """What its next attempt is known by to those who choose ranks, once somebody asked."""
    spans: AttemptSpans | None = None
    """Of the live attempt, where the request is traced."""
    _events: list[EngineCoreEvent] = field(default_factory=list)
    """For the next output."""

    def __post_init__(self) -> None:
        self.arrived_s = self.queued_s - max(0.0, time.time() - self.request.arrival_time)

    @property
    def request_id(self) -> str:
        """The id that the client sees."""
        return self.request.external_req_id or self.front_id

    def take_tokens(self, tokens: int) -> None:
        """So many, of prompt or answer, count as used by the client."""
        if self.account is not None:
            self.account.take_tokens(tokens)

    @property
    def tokens(self) -> int:
        """What the next attempt's prefill computes."""
        return self.prompt_tokens + len(self.output_token_ids)

    @property
    def next_leg_id(self) -> str:
        """The id of both legs of the next attempt; never used before."""
        return leg_id(self.choice_id, len(self.attempts) + 1)

    @property
    def reads_prefix_cache(self) -> bool:
        """As prefill decides it (vllm/v1/request.py, get_skip_reading_prefix_cache)."""
        params = self.request.sampling_params
        if params.skip_reading_prefix_cache is not None:
            return not params.skip_reading_prefix_cache
        return params.prompt_logprobs is None or bool(self.output_token_ids)

    def live(self) -> list[Attempt]:
        """The live attempts: none, one, or two where there is a hedge."""
        return [attempt for attempt in (self.attempt, self.hedge) if attempt is not None]

    def live_at(self, leg_id: str) -> Attempt | None:
        """The live attempt of this leg, which is one of a live attempt; asked for each output."""
        if self.hedge is None or self.hedge.leg_id != leg_id:
            return self.attempt
        return self.hedge

    def begin(
        self, prefill: RankLoad, decode: RankLoad, *, hand_off: bool, is_hedge: bool = False
    ) -> Attempt:
        """Both legs go to these ranks. `hand_off`: decode goes on from prefill's token."""
        number = len(self.attempts) + 1
        reason = AttemptReason.HEDGE if is_hedge else self.next_reason
        attempt = Attempt(self.next_leg_id, number, reason, prefill, decode, self.tokens, hand_off=hand_off)
        if is_hedge:
            self.attempts.append(attempt)
            self.hedge = attempt
            return attempt
        since_s = self.attempts[-1].ended_s if self.attempts else self.queued_s
        self.spans = attempt_spans.begin(self.request.trace_headers, attempt, self.request_id, since_s)
        self.attempts.append(attempt)
        self.attempt, self.asked = attempt, None
        return attempt

    def leave(self, loser: Attempt) -> None:
        """One of two live attempts is over; the other one goes on."""
        loser.over()
        if loser is self.attempt:
            self._close_spans(loser)
            self.attempt = self.hedge
        self.hedge = None
        if loser.end is not None:
            self._avoid(loser, loser.end)

    def attempt_over(self) -> None:
        """The live attempt ended; if without an answer, note what the next one has to know."""
        attempt = self.attempt
        if attempt is None:
            return
        self.attempt = None
        attempt.over()
        self._close_spans(attempt)
        if attempt.end is not None:
            self._note(attempt, attempt.end)

    def _close_spans(self, attempt: Attempt) -> None:
        if self.spans is not None:
            self.spans.close(attempt, self.tokens - attempt.tokens)
            self.spans = None

    def on_output(
        self, role: Role, output: EngineCoreOutput, clock_offset_s: float, of: Attempt | None = None
    ) -> list[EngineCoreOutput]:
        """Take an output of a live attempt's leg and return what goes to the front end now.

        `of`: the attempt, if there are two.
        Raises InternalError as `Attempt.on_output` does; sets `attempt.end` where another one may go on.
        """
        attempt = of or self.attempt
        if attempt is None:
            return []
        if role == "prefill" and output.finish_reason is None and self._ends_with(output.new_token_ids):
            return []  # the leg's end says so, and what else there is to say
        outputs = attempt.on_output(role, output, clock_offset_s)
        if self.spans is not None and attempt is self.attempt:
            self.spans.took(role, output)
        if role == "prefill" and attempt.hand_off and outputs and outputs[0] is output:
            first = self._first_token(attempt, outputs.pop(0))
            if attempt.hand_off_ended:
                return [first]
            return [first, *(self._for_client(attempt, released) for released in outputs)]
        return [self._for_client(attempt, released) for released in outputs]

    def _ends_with(self, token_ids: list[int]) -> bool:
        params = self.request.sampling_params
        return bool(token_ids) and end_of(params, [*self.output_token_ids, *token_ids])[0] is not None

    def _first_token(self, attempt: Attempt, output: EngineCoreOutput) -> EngineCoreOutput:
        """Make prefill's output the client's next one; decode's follow in outputs of their own."""
        attempt.prefill_output = output
        output.events = None  # a preemption there has delayed no token that the client had begun to wait for
        output = self._for_client(attempt, output)
        params = self.request.sampling_params
        output.finish_reason, output.stop_reason = end_of(params, self.output_token_ids)
        attempt.hand_off_ended = output.finish_reason is not None
        return output

    def _note(self, attempt: Attempt, end: AttemptEnd) -> None:
        self.next_reason = end.reason
        if self.stalled_s is None:
            self.stalled_s = attempt.ended_s
        # vLLM counts preemptions by these events. Decode's own may have come with its last tokens.
        if end.reason is AttemptReason.PREEMPTED and not attempt.preempted:
            self._events.append(EngineCoreEvent(EngineCoreEventType.PREEMPTED, attempt.ended_s))
        self._avoid(attempt, end)

    def _avoid(self, attempt: Attempt, end: AttemptEnd) -> None:
        for role in end.failed:
            load = attempt.load(role)
            for rank in load.node.ranks if end.whole_node else (load.rank,):
                self.failed_at[(load.node.address, rank.local_rank)] = attempt.number

    def _for_client(self, attempt: Attempt, output: EngineCoreOutput) -> EngineCoreOutput:
        """Make decode's output look like that of the one engine that the front end believes in.

        To that engine there is one stream: it is queued and scheduled once, and its prompt computed once.
        """
        preemptions = [e for e in output.events or () if e.type == EngineCoreEventType.PREEMPTED]
        attempt.preempted |= bool(preemptions)
        events, self._events = [*self._events, *preemptions], []
        output.request_id = self.front_id
        output.kv_transfer_params = None
        output.trace_headers = self.request.trace_headers  # the parent of vLLM's own span
        prefill, attempt.prefill_output = attempt.prefill_output, None
        if self.first_token_s:
            output.prefill_stats = None
        else:
            self.first_token_s = time.monotonic()
            events = [*self._first_events(attempt), *events]
            if prefill is not None:
                output.new_prompt_logprobs_tensors = prefill.new_prompt_logprobs_tensors
                output.prompt_token_id_logprobs = prefill.prompt_token_id_logprobs
                output.prefill_stats = prefill.prefill_stats or output.prefill_stats
        output.events = events or None
        # A copy: the front end cuts tokens after a stop string off the output's own list.
        self.output_token_ids += output.new_token_ids
        return output

    def _first_events(self, attempt: Attempt) -> list[EngineCoreEvent]:
        """Queueing ends when prefill first schedules the request; what decode waits is part of prefill."""
        scheduled_s = next((a.prefill_scheduled_s for a in self.attempts if a.prefill_scheduled_s), 0.0)
        return [
            EngineCoreEvent(EngineCoreEventType.QUEUED, self.queued_s),
            EngineCoreEvent(EngineCoreEventType.SCHEDULED, scheduled_s or attempt.dispatched_s),
        ]
