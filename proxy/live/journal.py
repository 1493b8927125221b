"""Keeps what requests have lately come to, for the live page: attempts, where they ran, when KV arrived."""

import time
from collections import OrderedDict, deque
from dataclasses import dataclass

from proxy.attempt import Attempt
from proxy.flight import Flight
from proxy.routing import RankLoad

KEPT_ENDED = 40
MAX_CHANGED = 200
"""More choices than these may change between two frames; only the last ones are then told."""


@dataclass(frozen=True, slots=True)
class Place:
    """A rank."""

    address: str
    local_rank: int
    global_rank: int


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """One attempt; times are milliseconds from its start, null for what has not happened.

    `prefilled_ms`: the prompt is computed. `arrived_ms`: decode's first output, so its KV has arrived.
    `end`: why it ended without an answer, or empty.
    """

    number: int
    reason: str
    phase: str
    hand_off: bool
    prefill: Place
    decode: Place
    prefilled_ms: float | None
    arrived_ms: float | None
    end: str


@dataclass(frozen=True, slots=True)
class ChoiceRow:
    """One choice of a request as it is now; `outcome` is empty until it has ended. No prompt, no text."""

    id: str
    request_id: str
    prompt_tokens: int
    output_tokens: int
    age_ms: float
    ttft_ms: float | None
    outcome: str
    attempts: list[AttemptRow]


class Journal:
    """Bounded; costs one row at each choice's end while nobody looks. Used from the event loop only."""

    def __init__(self) -> None:
        self.watched = False
        """Whether changes are of interest to anybody; what was kept before is dropped when nobody looks."""
        self._ended: deque[ChoiceRow] = deque(maxlen=KEPT_ENDED)
        self._changed: OrderedDict[str, Flight | ChoiceRow] = OrderedDict()
        self._left_out = 0

    def changed(self, flight: Flight) -> None:
        """A choice was sent, or one of its attempts has come further or is over."""
        if self.watched:
            self._change(flight.choice_id, flight)

    def ended(self, flight: Flight, outcome: str) -> None:
        """A choice is over, and `outcome` is how."""
        row = choice_row(flight, outcome)
        self._ended.append(row)
        if self.watched:
            self._change(flight.choice_id, row)

    def recent(self) -> list[ChoiceRow]:
        """Those that ended last, in order."""
        return list(self._ended)

    def take_changed(self) -> tuple[list[ChoiceRow], int]:
        """The choices that changed since the last call, as they are now, and how many were left out."""
        rows = [
            choice if isinstance(choice, ChoiceRow) else choice_row(choice)
            for choice in self._changed.values()
        ]
        left_out, self._left_out = self._left_out, 0
        self._changed.clear()
        return rows, left_out

    def _change(self, choice_id: str, choice: Flight | ChoiceRow) -> None:
        self._changed[choice_id] = choice
        self._changed.move_to_end(choice_id)
        if len(self._changed) > MAX_CHANGED:
            self._changed.popitem(last=False)
            self._left_out += 1


def choice_row(flight: Flight, outcome: str = "") -> ChoiceRow:
    """As the choice is now."""
    first_s = flight.first_token_s
    return ChoiceRow(
        id=flight.choice_id,
        request_id=flight.request_id,
        prompt_tokens=flight.prompt_tokens,
        output_tokens=len(flight.output_token_ids),
        age_ms=(time.monotonic() - flight.arrived_s) * 1000,
        ttft_ms=(first_s - flight.arrived_s) * 1000 if first_s else None,
        outcome=outcome,
        attempts=[_attempt_row(attempt) for attempt in flight.attempts],
    )


def _attempt_row(attempt: Attempt) -> AttemptRow:
    def since_start_ms(at_s: float) -> float | None:
        return (at_s - attempt.dispatched_s) * 1000 if at_s else None

    return AttemptRow(
        number=attempt.number,
        reason=str(attempt.reason),
        phase=attempt.phase.value,
        hand_off=attempt.hand_off,
        prefill=_place(attempt.prefill),
        decode=_place(attempt.decode),
        prefilled_ms=since_start_ms(attempt.prefilled_s),
        arrived_ms=since_start_ms(attempt.arrived_s),
        end=attempt.end.message if attempt.end else "",
    )


def _place(load: RankLoad) -> Place:
    return Place(load.node.address, load.rank.local_rank, load.rank.global_rank)
