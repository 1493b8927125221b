"""One request on a simulated rank, and what its leg says."""

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreRequest

from lockstep.sim.answers import Script
from lockstep.sim.pool import Holding


@dataclass(frozen=True, slots=True)
class Peer:
    """The prefill rank whose KV a decode leg waits for."""

    engine_id: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Leg:
    """A leg's `kv_transfer_params`; `peer` on decode only."""

    token: str
    carried: tuple[int, ...]
    """Tokens that earlier attempts generated."""
    hand_off: bool
    peer: Peer | None = None


ReadLeg = Callable[[EngineCoreRequest], Leg]
"""By the role, which knows the fields."""


@dataclass(slots=True, eq=False)
class Row:
    """An accepted request."""

    request: EngineCoreRequest
    leg: Leg
    script: Script
    tokens: list[int]
    """The prompt and what is carried: the KV that the row begins with."""
    next_index: int
    """Place in the answer of the token that comes next here."""
    holding: Holding = field(default_factory=Holding)
    computed: int = 0
    """Of `tokens`, on prefill; cached ones count."""
    chunk: int = 0
    """Tokens of it in the step that runs."""
    events: list[EngineCoreEvent] = field(default_factory=list)
    """For the next output."""

    @property
    def request_id(self) -> str:
        return str(self.request.request_id)

    @property
    def max_tokens(self) -> int | None:
        """Of the whole answer, what is carried included."""
        limit: int | None = self.request.sampling_params.max_tokens
        return limit

    def note(self, event: EngineCoreEventType) -> None:
        """It happened now."""
        self.events.append(EngineCoreEvent.new_event(event))

    def take_events(self) -> list[EngineCoreEvent] | None:
        """Those that no output has told of."""
        events, self.events = self.events, []
        return events or None
