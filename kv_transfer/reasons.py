"""Why a KV transfer ended otherwise than by a whole push: all the words that are counted and sent.

A reason that comes from a peer is counted only if it is one of these, so that labels of metrics stay bounded.
"""

OTHER = "other"

REASONS = frozenset(
    {
        *("aborted", "aborted_before_allocation", "aborted_after_prefill", "cancelled", "nothing_to_load"),
        *("block_mismatch", "hand_off_mismatch", "no_token", "token_mismatch", "too_many_registrations"),
        *("deadline", "lease_expired", "pushed", "revoked"),
        *("push_failed", "registration_failed"),
        *("decode_unreachable", "prefill_dead", "prefill_unknown", "prefill_unreachable"),
        # vLLM's RequestStatus, in lower case: how a prompt ended on prefill.
        *("finished_aborted", "finished_error", "finished_ignored"),
        *("finished_length_capped", "finished_repetition", "finished_stopped"),
        OTHER,
    }
)


def bounded(reason: str) -> str:
    """The reason as it is counted."""
    return reason if reason in REASONS else OTHER
