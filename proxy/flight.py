"""The state of one request in flight: its two legs, what has come from each, and when."""

import enum
import time
from dataclasses import dataclass, field

from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)

from lockstep.errors import InternalError, KVTransferError
from proxy.routing import RankLoad


class Phase(enum.Enum):
    """Where a request is; it only moves down this list."""

    QUEUED = "queued"
    """In the proxy, below no rank's window yet."""
    DISPATCHED = "dispatched"
    """Both legs are with their nodes."""
    PREFILLED = "prefilled"
    """The prefill leg ended well; its KV is on its way or there."""
    STREAMING = "streaming"
    """Decode's first token was passed on, so the KV has arrived and prefill is no longer needed."""


@dataclass(slots=True, eq=False)
class Flight:
    """One choice of a client's request, from `add_request_async` to its end.

    `front_id` is vLLM's internal id, unique however often a client repeats its X-Request-Id; `leg_id` is
    ours. Times are `time.monotonic` of the proxy.
    """

    front_id: str
    request: EngineCoreRequest
    leg_id: str
    prompt_tokens: int
    phase: Phase = Phase.QUEUED
    prefill: RankLoad | None = None
    decode: RankLoad | None = None
    queued_s: float = field(default_factory=time.monotonic)
    arrived_s: float = field(init=False)
    """Before `queued_s` by what tokenizing took; vLLM notes the arrival on the wall clock."""
    dispatched_s: float = 0.0
    prefill_scheduled_s: float = 0.0
    prefilled_s: float = 0.0
    first_token_s: float = 0.0
    output_tokens: int = 0
    prefill_released: bool = False
    """The prompt no longer counts as outstanding on its prefill rank."""
    _prefill_output: EngineCoreOutput | None = None
    _held: list[EngineCoreOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arrived_s = self.queued_s - max(0.0, time.time() - self.request.arrival_time)

    @property
    def request_id(self) -> str:
        """The id that the client sees."""
        return self.request.external_req_id or self.front_id

    def dispatched(self, prefill: RankLoad, decode: RankLoad) -> None:
        """Both legs were sent."""
        self.phase = Phase.DISPATCHED
        self.prefill, self.decode = prefill, decode
        self.dispatched_s = time.monotonic()

    def on_prefill(self, output: EngineCoreOutput, clock_offset_s: float) -> list[EngineCoreOutput]:
        """Take an output of the prefill leg and return what may go to the front end now.

        The leg's token is not for the client: decode samples its own first token in this version. Passing
        this one on early starts here. Raises InternalError if the leg ended other than by its length.
        """
        for event in output.events or ():
            if event.type == EngineCoreEventType.SCHEDULED and not self.prefill_scheduled_s:
                self.prefill_scheduled_s = event.timestamp + clock_offset_s
        if output.finish_reason is None:
            return []
        if output.finish_reason is not FinishReason.LENGTH:
            raise InternalError("The prompt could not be computed.")
        self._prefill_output = output
        self.phase = Phase.PREFILLED
        self.prefilled_s = time.monotonic()
        held, self._held = self._held, []
        return [self._for_client(held_output) for held_output in held]

    def on_decode(self, output: EngineCoreOutput, clock_offset_s: float) -> list[EngineCoreOutput]:
        """Take an output of the decode leg and return what may go to the front end now.

        The two nodes' streams are not ordered among each other, so decode's first output waits for prefill's
        last: prompt logprobs and cached-token counts come from there. Raises KVTransferError or InternalError
        for an end that is not one of generation.
        """
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            if self.phase is Phase.STREAMING:
                raise InternalError("The generation failed.")
            raise KVTransferError("The KV cache did not reach the decode rank.")
        _rebase(output.events, clock_offset_s)
        if self.phase is Phase.DISPATCHED:
            self._held.append(output)
            return []
        return [self._for_client(output)]

    def _for_client(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """Make decode's output look like that of the one engine that the front end believes in."""
        output.request_id = self.front_id
        output.kv_transfer_params = None
        self.output_tokens += len(output.new_token_ids)
        if self.phase is not Phase.STREAMING:
            self.phase = Phase.STREAMING
            self.first_token_s = time.monotonic()
            self._add_prefill_part(output)
        return output

    def _add_prefill_part(self, output: EngineCoreOutput) -> None:
        """Queueing ends when prefill first schedules the request; what decode waits is part of prefill."""
        preempted = [e for e in output.events or () if e.type == EngineCoreEventType.PREEMPTED]
        output.events = [
            EngineCoreEvent(EngineCoreEventType.QUEUED, self.queued_s),
            EngineCoreEvent(EngineCoreEventType.SCHEDULED, self.prefill_scheduled_s or self.dispatched_s),
            *preempted,
        ]
        prefill = self._prefill_output
        if prefill is not None:
            output.new_prompt_logprobs_tensors = prefill.new_prompt_logprobs_tensors
            output.prompt_token_id_logprobs = prefill.prompt_token_id_logprobs
            output.prefill_stats = prefill.prefill_stats or output.prefill_stats
            self._prefill_output = None

    def timings(self) -> str:
        """The steps in milliseconds from queueing on; '-' for one that was not reached."""
        steps = {
            "dispatched": self.dispatched_s,
            "prefilled": self.prefilled_s,
            "first_token": self.first_token_s,
            "finished": time.monotonic(),
        }
        return " ".join(
            f"{name}_ms={(at - self.queued_s) * 1000:.1f}" if at else f"{name}_ms=-"
            for name, at in steps.items()
        )


def _rebase(events: list[EngineCoreEvent] | None, clock_offset_s: float) -> None:
    """Move events to this process's clock; monotonic clocks of two machines have nothing in common."""
    for event in events or ():
        event.timestamp += clock_offset_s
