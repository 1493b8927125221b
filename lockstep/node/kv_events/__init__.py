"""Tells proxies which blocks the prefix caches of this node have: read in the engine, kept by the node."""

KEY_BYTES = 8
"""Of a block's hash its last bytes are told, as vLLM's own events have them (kv_cache_utils.py:96)."""

EVENTS_UTILITY = "lockstep_kv_events"
"""Called on an engine core; answers with the next changes of its prefix cache."""
