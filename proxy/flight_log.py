"""What the log says of a choice: one INFO line at its end, and a WARNING for each attempt that failed."""

import logging
import time

from lockstep import logs
from proxy.attempt import Attempt
from proxy.flight import Flight
from proxy.tracing.context import trace_id

logger = logging.getLogger(__name__)


def attempt_over(flight: Flight, attempt: Attempt) -> None:
    """An attempt ended without an answer."""
    if attempt.end is None:
        return
    bound = logs.request_id.set(flight.request_id)
    logger.warning(
        "%s: attempt %d ended while %s: %s (%s), output_tokens=%d %s",
        attempt.leg_id,
        attempt.number,
        attempt.phase.value,
        attempt.end.reason,
        attempt.end.message,
        len(flight.output_token_ids),
        _ranks(attempt),
    )
    logs.request_id.reset(bound)


def ended(flight: Flight, outcome: str) -> None:
    """The one line of a choice; it names the trace where there is one."""
    bound = logs.request_id.set(flight.request_id)
    reasons = ",".join(attempt.reason for attempt in flight.attempts)
    trace = trace_id(flight.request.trace_headers)
    logger.info(
        "%s: %s, key=%s prompt_tokens=%d output_tokens=%d attempts=%d%s %s %s%s",
        flight.choice_id,
        outcome,
        flight.account.label if flight.account else "-",
        flight.prompt_tokens,
        len(flight.output_token_ids),
        len(flight.attempts),
        f"({reasons})" if reasons else "",
        timings(flight),
        _ranks(flight.attempts[-1]) if flight.attempts else "prefill=- decode=-",
        f" trace={trace}" if trace else "",
    )
    logs.request_id.reset(bound)


def timings(flight: Flight) -> str:
    """The steps in milliseconds from queueing on; '-' for one that was not reached.

    The first attempt's steps have no mark, those of attempt n end in `_tn`.
    """
    first = flight.attempts[0] if flight.attempts else None
    steps = {
        "dispatched": first.dispatched_s if first else 0.0,
        "prefilled": first.prefilled_s if first else 0.0,
        "first_token": flight.first_token_s,
    }
    for attempt in flight.attempts[1:]:
        mark = f"_t{attempt.number}"
        steps[f"dispatched{mark}"] = attempt.dispatched_s
        steps[f"prefilled{mark}"] = attempt.prefilled_s
        steps[f"token{mark}"] = attempt.first_output_s
    steps["finished"] = time.monotonic()
    return " ".join(
        f"{name}_ms={(at - flight.queued_s) * 1000:.1f}" if at else f"{name}_ms=-"
        for name, at in steps.items()
    )


def _ranks(attempt: Attempt) -> str:
    return (
        f"prefill={attempt.prefill.node.address}/{attempt.prefill.rank.local_rank} "
        f"decode={attempt.decode.node.address}/{attempt.decode.rank.local_rank}"
    )
