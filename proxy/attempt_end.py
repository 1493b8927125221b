"""Which ends of an attempt let another one go on, and what each is called: pure functions of one event."""

import logging
from dataclasses import dataclass

from vllm.v1.engine import FinishReason

from lockstep.bounce import Bounce
from lockstep.errors import InternalError, KVTransferError, LockstepError, NodeLostError
from proxy.metrics import AttemptReason
from proxy.nodes import Role

logger = logging.getLogger(__name__)

BOTH: tuple[Role, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """An attempt that ended without an answer, in a way that another may not share."""

    reason: AttemptReason
    """That of the attempt that follows."""
    message: str
    """What the client is told if none follows."""
    failed: tuple[Role, ...] = ()
    """The sides whose rank the next attempt should not take if it can take another."""
    whole_node: bool = False
    """It was not this rank's doing: the node's other ranks are no better."""


SAMPLED_ANEW = AttemptEnd(
    AttemptReason.PREEMPTED, "The prefill rank needed the memory for other requests, and sampled anew."
)
"""The leg's token is not the one that was passed on; decode would go on from another text."""

_BOUNCES = {
    Bounce.PREEMPTED: AttemptEnd(
        AttemptReason.PREEMPTED, "The decode rank needed the memory for other requests."
    ),
    Bounce.KV_LOAD_FAILED: AttemptEnd(
        AttemptReason.KV_LOAD_FAILED, "The KV cache did not reach the decode rank.", BOTH
    ),
    Bounce.REVOKED: AttemptEnd(
        AttemptReason.REVOKED, "The decode rank needed the memory for requests that were further on."
    ),
    Bounce.LOCAL_PREFILL: AttemptEnd(
        AttemptReason.LOCAL_PREFILL, "The KV cache did not reach the decode rank whole.", BOTH
    ),
}


def prefill_ended(reason: FinishReason) -> AttemptEnd | None:
    """None when the KV is pushed, which is only after an end by length.

    Raises InternalError for an end that no other rank would make otherwise: the leg asks for none of them.
    """
    if reason is FinishReason.LENGTH:
        return None
    if reason is FinishReason.ABORT:
        return lost("prefill")
    message = "The prompt could not be computed."
    if reason is FinishReason.ERROR:
        return AttemptEnd(AttemptReason.PREFILL_FAILED, message, ("prefill",))
    raise InternalError(message)


def decode_ended(
    reason: FinishReason | None, stop_reason: int | str | None, kv_arrived: bool
) -> AttemptEnd | None:
    """None while generation goes on and when it ends as the client asked.

    `kv_arrived`: this attempt has had tokens from decode. Before that, vLLM ends a request whose KV load
    failed with "error" (v1/core/sched/scheduler.py, kv_load_failure_policy "fail"). Raises InternalError for
    an end that another attempt would come to as well.
    """
    if reason not in (FinishReason.ABORT, FinishReason.ERROR):
        return None
    if reason is FinishReason.ABORT and stop_reason in Bounce.__members__.values():
        bounce = Bounce(str(stop_reason))
        if bounce in _BOUNCES:
            return _BOUNCES[bounce]
        # The proxy admits by the limit that the nodes serve, and decode's own is larger by what a step can
        # need beyond it: this is a fault of one of the two, and the next attempt would be as long.
        logger.error("decode had no room left below the served context limit: %s", bounce)
        raise InternalError("The decode rank had no room left below the served context limit.")
    if reason is FinishReason.ABORT and stop_reason is None:
        return lost("decode")
    if kv_arrived:
        raise InternalError("The generation failed.")
    return _BOUNCES[Bounce.KV_LOAD_FAILED]


def refused(role: Role, error: LockstepError) -> AttemptEnd:
    """A node answered with an error instead of outputs. Raises the error if it says not to try again."""
    if isinstance(error, NodeLostError):
        return lost(role)
    if isinstance(error, KVTransferError):
        return AttemptEnd(AttemptReason.KV_LOAD_FAILED, str(error), BOTH)
    if error.retryable:
        return AttemptEnd(AttemptReason.REFUSED, str(error), (role,), whole_node=True)
    raise error


def lost(role: Role) -> AttemptEnd:
    """The node went away, says that it lost the request, or has aborted it though no proxy asked for that.

    The last is an engine core that was told to stop (v1/engine/core.py:1648), as vLLM tells the others of a
    node once one has died: that may be heard of before the node says that it lost them all.
    """
    reason = AttemptReason.PREFILL_LOST if role == "prefill" else AttemptReason.DECODE_LOST
    return AttemptEnd(reason, "A node that held the request went away.", (role,), whole_node=True)


def drained(role: Role) -> AttemptEnd:
    """The node is about to exit, and the attempt is not left to end with it."""
    return AttemptEnd(
        AttemptReason.DRAINED, "The node that held the request is shutting down.", (role,), whole_node=True
    )
