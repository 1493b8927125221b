"""Circuit breakers: a prefill node or decode group that keeps failing gets no requests for a while."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from proxy.nodes import Node, Role
from proxy.retries.limits import RetryLimits

logger = logging.getLogger(__name__)

State = Literal["closed", "open", "half_open"]

Unit = tuple[Role, str]
"""What fails as one: a prefill node by its address, a decode group by its id."""


def unit_of(node: Node) -> Unit:
    """What a failure on the node is counted against. The ranks of a decode group step together."""
    return node.role, node.address if node.role == "prefill" else node.group_id


@dataclass(slots=True)
class _Breaker:
    failures: int = 0
    """In a row."""
    alone: bool = False
    """One of them was nobody else's fault."""
    partners: set[Unit] = field(default_factory=set)
    """Those of the other role that the rest may as well have come from."""
    open_until_s: float | None = None
    """None: closed. Past: half open."""
    probe: str | None = None
    """The leg of the one attempt that a half-open one is tried with."""


class Breakers:
    """Of all units that have failed; no I/O here. The verdict is that KV arrives on decode, or fails to."""

    def __init__(
        self,
        limits: RetryLimits,
        on_change: Callable[[Role, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._on_change = on_change
        """Called with the number of breakers of a role that are not closed."""
        self._clock = clock
        self._breakers: dict[Unit, _Breaker] = {}
        self._units: dict[str, Unit] = {}
        """Of all addresses that are listed, as last described."""

    def usable(self, nodes: Iterable[Node], failed: frozenset[Unit]) -> list[Node]:
        """Those to choose from: closed ones, and half-open ones that no request is trying.

        With none of these, all, but for the open ones that this very request has failed on: with nothing else
        to turn to a broken one is better than an error, but not twice.
        """
        nodes = list(nodes)
        if not self._breakers:
            return nodes
        trusted = [node for node in nodes if self._is_free(unit_of(node))]
        return trusted or [node for node in nodes if unit_of(node) not in failed]

    def sent(self, nodes: Sequence[Node], leg_id: str) -> None:
        """An attempt goes to these nodes; a half-open one is tried by it."""
        for node in nodes:
            breaker = self._breakers.get(unit_of(node))
            if breaker is not None and self._state(breaker) == "half_open" and breaker.probe is None:
                breaker.probe = leg_id

    def worked(self, nodes: Sequence[Node]) -> None:
        """The KV of an attempt has come from the one to the other."""
        for node in nodes:
            unit = unit_of(node)
            if self._breakers.pop(unit, _CLOSED).open_until_s is not None:
                logger.info("%s %s works again", *unit)
                self._changed(unit)

    def failed(self, node: Node, partner: Node | None = None) -> None:
        """An attempt failed there, or between it and `partner`: then nobody knows on which of them.

        What fails with one partner only, while there are others, is the partner's fault until shown
        otherwise: else a broken prefill node would take the only decode group with it.
        """
        unit = unit_of(node)
        breaker = self._breakers.setdefault(unit, _Breaker())
        breaker.failures += 1
        if partner is None:
            breaker.alone = True
        else:
            breaker.partners.add(unit_of(partner))
        state = self._state(breaker)
        if breaker.failures >= self._limits.breaker_failures and state != "open" and self._is_to_blame(unit):
            breaker.open_until_s = self._clock() + self._limits.breaker_open_s
            breaker.probe = None
            if state == "closed":
                logger.error("%s %s failed %d times in a row", *unit, breaker.failures)
                self._changed(unit)

    def over(self, nodes: Sequence[Node], leg_id: str) -> None:
        """The attempt is over. If it was a trial without a verdict, another one may try."""
        for node in nodes:
            breaker = self._breakers.get(unit_of(node))
            if breaker is not None and breaker.probe == leg_id:
                breaker.probe = None

    def restarted(self, node: Node) -> None:
        """A session with it is open: what was open is to be tried at once."""
        unit = unit_of(node)
        if self._units.get(node.address) != unit:
            self.forget(node.address)  # a group without a name of its own has another one with each start
        self._units[node.address] = unit
        breaker = self._breakers.get(unit)
        if breaker is not None and breaker.open_until_s is not None:
            breaker.open_until_s = self._clock()
            breaker.probe = None

    def forget(self, address: str) -> None:
        """The address is not listed any more, or another unit is there now."""
        unit = self._units.pop(address, None)
        if unit is not None and unit not in self._units.values():
            self._breakers.pop(unit, None)
            self._changed(unit)

    def _changed(self, unit: Unit) -> None:
        role = unit[0]
        breakers = (breaker for (other, _), breaker in self._breakers.items() if other == role)
        self._on_change(role, sum(breaker.open_until_s is not None for breaker in breakers))

    def _is_to_blame(self, unit: Unit) -> bool:
        breaker = self._breakers[unit]
        others = {other for other in self._units.values() if other[0] != unit[0]}
        return breaker.alone or len(breaker.partners) >= min(2, len(others))

    def _is_free(self, unit: Unit) -> bool:
        breaker = self._breakers.get(unit, _CLOSED)
        return self._state(breaker) != "open" and breaker.probe is None

    def _state(self, breaker: _Breaker) -> State:
        if breaker.open_until_s is None:
            return "closed"
        return "open" if self._clock() < breaker.open_until_s else "half_open"


_CLOSED = _Breaker()
"""To be read."""
