"""Every choice that has not ended, and the ways on from there: another attempt, an end, an error."""

import asyncio
import logging
import time
from collections.abc import Iterator

from lockstep.errors import (
    AttemptsExhaustedError,
    DeadlineError,
    InternalError,
    LockstepError,
    NodeLostError,
    OverloadedError,
    UnavailableError,
)
from proxy import flight_log
from proxy.admission.queue_limits import QueueLimits, retry_after_s
from proxy.attempt import Attempt, Phase
from proxy.dispatch import Dispatcher
from proxy.flight import Flight
from proxy.live.journal import Journal
from proxy.metrics import ProxyMetrics, Refusal
from proxy.retries.rules import RetryRules
from proxy.window_queue import WindowQueue

logger = logging.getLogger(__name__)


class InFlight:
    """Each choice in here has a deadline, and a live attempt; or it waits: queued, or to be queued."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        metrics: ProxyMetrics,
        journal: Journal,
        request_timeout_s: float,
        max_attempts: int,
        queue_limits: QueueLimits,
        retry_rules: RetryRules,
    ) -> None:
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._journal = journal
        self._request_timeout_s = request_timeout_s
        self._max_attempts = max_attempts
        self._queue_limits = queue_limits
        self._retry_rules = retry_rules
        self._backoffs: dict[str, asyncio.TimerHandle] = {}
        self._hedges: dict[str, asyncio.TimerHandle] = {}
        self._flights: dict[str, Flight] = {}
        self._deadlines: dict[str, tuple[asyncio.TimerHandle, ...]] = {}
        self._queue: WindowQueue[Flight] = WindowQueue(self._send, self._cannot_send)
        self.empty = asyncio.Event()
        self.empty.set()

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def num_queued(self) -> int:
        """Choices that wait for a prefill rank below its window."""
        return len(self._queue)

    def __iter__(self) -> Iterator[Flight]:
        """In the order in which they came; none may end meanwhile."""
        return iter(self._flights.values())

    def all(self) -> list[Flight]:
        """In the order in which they came; a copy, so they may end meanwhile."""
        return list(self._flights.values())

    def get(self, front_id: str) -> Flight | None:
        """The choice with vLLM's id, if it has not ended."""
        return self._flights.get(front_id)

    def pump(self) -> None:
        """Send what can be sent; call it whenever room may have come up."""
        self._queue.pump()

    def start(self, flight: Flight) -> None:
        """Queue a choice; whatever goes wrong with it from now on reaches it through its outlet."""
        self._flights[flight.front_id] = flight
        self.empty.clear()
        loop = asyncio.get_running_loop()
        self._deadlines[flight.front_id] = (
            loop.call_later(self._request_timeout_s, self._expire, flight),
            loop.call_later(self._queue_limits.timeout_s, self._expire_queued, flight),
        )
        flight.take_tokens(flight.prompt_tokens)
        self._retry_rules.came()
        self._journal.changed(flight)
        self._queue.put(flight, priority=flight.request.priority)

    def make_room(self, choices: int, priority: int) -> None:
        """For a request that wants to wait here with so many choices.

        Choices of a worse priority have to go for it; without enough of those, raises OverloadedError.
        """
        too_many = len(self._queue) + choices - self._queue_limits.max_queued
        for _ in range(too_many):
            last = self._queue.last_below(priority)
            if last is None or choices > self._queue_limits.max_queued:
                self._metrics.refused(Refusal.QUEUE_FULL)
                raise OverloadedError("As many requests wait as may. Try again later.")
            self._metrics.refused(Refusal.DISPLACED)
            self.fail(last, OverloadedError("Requests of a better priority came. Try again later."))

    def retry_after_s(self) -> int:
        """When a client that is refused now may well come back."""
        head = self._queue.head()
        return retry_after_s(time.monotonic() - head.queued_s if head is not None else 0.0)

    def try_again(self, flight: Flight) -> None:
        """Follow a live attempt whose `end` is set by another one, ahead of choices that have had none."""
        self._dispatcher.decide(flight)
        attempt = flight.attempt
        if attempt is None or attempt.end is None:
            return
        flight_log.attempt_over(flight, attempt)
        self._dispatcher.take_back(flight, abort=True)
        self._journal.changed(flight)
        if len(flight.attempts) >= self._max_attempts:
            times = f"{len(flight.attempts)} attempt{'s' * (len(flight.attempts) > 1)}"
            self.fail(flight, AttemptsExhaustedError(f"Gave up after {times}: {attempt.end.message}"))
        elif len(flight.output_token_ids) >= flight.request.sampling_params.max_tokens:
            # The last token of an answer and its finish come in one output: none is lost between the two.
            logger.error("%s: decode ended the attempt after the answer's last token", attempt.leg_id)
            self.fail(flight, InternalError("The generation failed."))
        else:
            self._send_again(flight, attempt.end.message)

    def _send_again(self, flight: Flight, message: str) -> None:
        wait_s = self._retry_rules.wait_s(flight)
        if wait_s is None:
            error = AttemptsExhaustedError(f"Too many requests have to be tried again now: {message}")
            self.fail(flight, error)
        elif wait_s:
            loop = asyncio.get_running_loop()
            self._backoffs[flight.front_id] = loop.call_later(wait_s, self._waited, flight)
        else:
            self._queue.put(flight, ahead=True)

    def _waited(self, flight: Flight) -> None:
        del self._backoffs[flight.front_id]
        self._queue.put(flight, ahead=True)

    def fail(self, flight: Flight, error: LockstepError) -> None:
        """End a choice with an error, its siblings with it (one client request is one answer)."""
        if self._flights.get(flight.front_id) is not flight:
            return
        outcome = type(error).__name__
        self._forget(flight, outcome, abort=True)
        for front_id in flight.outlet.fail_request(flight.front_id, error):
            sibling = self._flights.get(front_id)
            if sibling is not None:
                self._forget(sibling, outcome, abort=True)
        self._queue.pump()  # not before the siblings are out of it

    def end(self, flight: Flight, outcome: str, abort: bool) -> None:
        """Forget a choice; with `abort`, both nodes are told, whichever legs they still have."""
        self._forget(flight, outcome, abort)
        self._queue.pump()

    def _forget(self, flight: Flight, outcome: str, abort: bool) -> None:
        del self._flights[flight.front_id]
        for timer in self._deadlines.pop(flight.front_id):
            timer.cancel()
        for timers in (self._backoffs, self._hedges):
            if flight.front_id in timers:
                timers.pop(flight.front_id).cancel()
        flight.take_tokens(len(flight.output_token_ids))
        self._queue.discard(flight)
        self._dispatcher.take_back(flight, abort)
        if not self._flights:
            self.empty.set()
        self._metrics.ended(outcome, len(flight.attempts))
        self._journal.ended(flight, outcome)
        flight_log.ended(flight, outcome)

    def _send(self, flight: Flight) -> bool:
        sent = self._dispatcher.send(flight)
        if sent:
            self._journal.changed(flight)
            self._hedge_later(flight)
        return sent

    def _hedge_later(self, flight: Flight) -> None:
        after_s = self._retry_rules.hedge_after_s
        if after_s is None or flight.request.data_parallel_rank is not None:
            return
        if flight.front_id in self._hedges:
            self._hedges[flight.front_id].cancel()
        loop = asyncio.get_running_loop()
        self._hedges[flight.front_id] = loop.call_later(after_s, self._hedge, flight, flight.attempt)

    def _hedge(self, flight: Flight, first: Attempt | None) -> None:
        """Not while others wait: what a hedge takes would be theirs."""
        del self._hedges[flight.front_id]
        if first is None or flight.attempt is not first or first.phase is not Phase.DISPATCHED:
            return
        if len(self._queue) or len(flight.attempts) >= self._max_attempts:
            return
        if self._retry_rules.may_hedge() and self._dispatcher.hedge(flight, first):
            self._journal.changed(flight)

    def _expire(self, flight: Flight) -> None:
        self.fail(flight, DeadlineError("The request did not finish in its time."))

    def _expire_queued(self, flight: Flight) -> None:
        if not flight.attempts:
            self._metrics.refused(Refusal.QUEUE_TIMEOUT)
            self.fail(flight, OverloadedError("The request waited for too long. Try again later."))

    def _cannot_send(self, flight: Flight, error: LockstepError) -> None:
        """No node can take it. What ended the attempt before is the better part of the news."""
        before = flight.attempts[-1].end if flight.attempts else None
        if before is not None and isinstance(error, UnavailableError):
            error = NodeLostError(f"{error} Before that: {before.message}")
        self.fail(flight, error)
