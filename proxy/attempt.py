"""One attempt: a prefill leg and a decode leg under one id, what has come from each, and when."""

import enum
import time
from dataclasses import dataclass, field

from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput

from lockstep.errors import LockstepError
from proxy import attempt_end
from proxy.attempt_end import AttemptEnd
from proxy.metrics import AttemptReason
from proxy.nodes import Role
from proxy.routing import RankLoad


class Phase(enum.Enum):
    """Where an attempt is; it only moves down this list."""

    DISPATCHED = "dispatched"
    """Both legs are with their nodes."""
    SAMPLED = "sampled"
    """Prefill's token is known and passed on, and its leg has not ended yet."""
    PREFILLED = "prefilled"
    """The prefill leg ended well; its KV is on its way or there."""
    STREAMING = "streaming"
    """Decode's first token was passed on, so the KV has arrived and prefill is no longer needed."""


@dataclass(slots=True, eq=False)
class Attempt:
    """Both legs, from the moment they are sent to that at which they end or are given up.

    `tokens` are those of the prompt and of earlier attempts, all of which prefill computes. Times are
    `time.monotonic` of the proxy, 0 until it comes to them. Once `end` is set, no event is of interest.
    """

    leg_id: str
    number: int
    reason: AttemptReason
    prefill: RankLoad
    decode: RankLoad
    tokens: int
    uncached_tokens: int = 0
    """Those of them that prefill did not have, as far as was known."""
    hand_off: bool = False
    """Prefill's token is the client's, and decode goes on from it."""
    early_token_ids: list[int] = field(default_factory=list)
    """Prefill's token, if it was passed on before its leg ended."""
    phase: Phase = Phase.DISPATCHED
    end: AttemptEnd | None = None
    dispatched_s: float = field(default_factory=time.monotonic)
    prefill_scheduled_s: float = 0.0
    prefilled_s: float = 0.0
    first_output_s: float = 0.0
    arrived_s: float = 0.0
    """Decode's first output: its KV has arrived."""
    ended_s: float = 0.0
    begun: dict[Role, int] = field(default_factory=dict)
    """What `RankLoad.begin` returned for each leg."""
    prefill_released: bool = False
    """The tokens no longer count as outstanding on the prefill rank."""
    prefill_holds: bool = False
    """They do as held: the prompt is computed, and decode has not shown that its KV is there."""
    prefill_output: EngineCoreOutput | None = None
    hand_off_ended: bool = False
    """The answer ended with prefill's token; neither leg is needed any more."""
    preempted: bool = False
    """An event that says so was passed on."""
    _held: list[EngineCoreOutput] = field(default_factory=list)

    def role_at(self, address: str) -> Role | None:
        """Which leg a node has, if it has one."""
        if address == self.prefill.node.address:
            return "prefill"
        return "decode" if address == self.decode.node.address else None

    def load(self, role: Role) -> RankLoad:
        """The rank that has a leg."""
        return self.prefill if role == "prefill" else self.decode

    def on_output(
        self, role: Role, output: EngineCoreOutput, clock_offset_s: float
    ) -> list[EngineCoreOutput]:
        """Take an output of one leg and return those of decode that may be passed on now, or set `end`.

        Raises InternalError for an end that another attempt would come to as well.
        """
        _rebase(output.events, clock_offset_s)
        return self._on_prefill(output) if role == "prefill" else self._on_decode(output)

    def on_error(self, role: Role, error: LockstepError) -> None:
        """A node answered one leg with an error: set `end`, or raise it if it says not to try again."""
        if self.needs(role):
            self.end = attempt_end.refused(role, error)

    def on_loss(self, role: Role) -> None:
        """The node of one leg went away: set `end` if that leg was still needed."""
        if self.needs(role):
            self.end = attempt_end.lost(role)

    def on_drain(self, role: Role) -> None:
        """The node of one leg is about to exit: set `end` if that leg is still needed."""
        if self.needs(role) and self.end is None:
            self.end = attempt_end.drained(role)

    def over(self) -> None:
        """Nothing more will be taken. What is held was not passed on: the next attempt generates it anew."""
        self.ended_s = time.monotonic()
        self._held.clear()
        self.prefill_output = None

    def _on_prefill(self, output: EngineCoreOutput) -> list[EngineCoreOutput]:
        """With a hand-off the leg's token goes on at once; if not, decode samples its own first one."""
        for event in output.events or ():
            if event.type == EngineCoreEventType.SCHEDULED and not self.prefill_scheduled_s:
                self.prefill_scheduled_s = event.timestamp
        sampled = self.phase is Phase.SAMPLED
        if not sampled and self.phase is not Phase.DISPATCHED:
            return []
        if output.finish_reason is None:
            return [] if sampled else self._on_early_token(output)
        self.end = attempt_end.prefill_ended(output.finish_reason)
        if self.end is None and sampled and output.new_token_ids != self.early_token_ids:
            self.end = attempt_end.SAMPLED_ANEW
        if self.end is not None:
            return []
        self.phase = Phase.PREFILLED
        self.prefilled_s = time.monotonic()
        if sampled:
            return self._released()
        if self.hand_off:
            self.first_output_s = self.prefilled_s
            return [output, *self._released()]
        self.prefill_output = output
        return self._released()

    def _on_early_token(self, output: EngineCoreOutput) -> list[EngineCoreOutput]:
        """Prefill tells its token before it makes drafts, and tells it again at its leg's end."""
        if not self.hand_off or not output.new_token_ids:
            return []
        self.phase = Phase.SAMPLED
        self.early_token_ids = list(output.new_token_ids)
        self.first_output_s = time.monotonic()
        return [output]

    def _on_decode(self, output: EngineCoreOutput) -> list[EngineCoreOutput]:
        if self._held and self._held[-1].finish_reason is not None:
            return []  # nothing comes after an end
        self.end = attempt_end.decode_ended(output.finish_reason, output.stop_reason, self._kv_arrived)
        if self.end is not None:
            return []
        self._held.append(output)
        return self._released()

    def _released(self) -> list[EngineCoreOutput]:
        """What may go on now.

        The two nodes' streams are not ordered among each other, so decode's outputs wait for prefill's last:
        prompt logprobs and cached-token counts come from there.
        """
        if self.phase in (Phase.DISPATCHED, Phase.SAMPLED) or not self._held:
            return []
        if self.phase is not Phase.STREAMING:
            self.phase = Phase.STREAMING
            self.arrived_s = time.monotonic()
            self.first_output_s = self.first_output_s or self.arrived_s
        released, self._held = self._held, []
        return released

    @property
    def _kv_arrived(self) -> bool:
        return self.phase is Phase.STREAMING or bool(self._held)

    def needs(self, role: Role) -> bool:
        """Prefill is needed until decode's first token shows that the KV has arrived."""
        return role == "decode" or self.phase is not Phase.STREAMING


def _rebase(events: list[EngineCoreEvent] | None, clock_offset_s: float) -> None:
    """Move events to this process's clock; monotonic clocks of two machines have nothing in common."""
    for event in events or ():
        event.timestamp += clock_offset_s
