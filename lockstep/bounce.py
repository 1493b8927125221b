"""Why a decode rank hands a request back: the words that travel from its scheduler to the proxy."""

from enum import StrEnum


class Bounce(StrEnum):
    """`EngineCoreOutput.stop_reason` of a request that ended with finish_reason "abort" to be tried anew.

    `FinishReason` is a closed enumeration, and vLLM's front end turns "error" into a 500
    (entrypoints/generate/base/serving.py:200), so a plain vLLM server shows its client finish_reason
    "abort" and one of these as stop_reason. The tokens generated so far are good; the request may be sent
    to prefill again with them.
    """

    PREEMPTED = "lockstep_preempted"
    """Its KV blocks were needed for another request."""
    KV_LOAD_FAILED = "lockstep_kv_load_failed"
    """The KV cache did not arrive, or not whole."""
    REVOKED = "lockstep_revoked"
    """It had blocks but prefill had not begun; they were needed for requests that prefill has finished."""
    LOCAL_PREFILL = "lockstep_local_prefill"
    """More than one of its tokens would have to be computed here."""
    CONTEXT_LIMIT = "lockstep_context_limit"
    """No room is left below the served context limit; another attempt would not help."""
