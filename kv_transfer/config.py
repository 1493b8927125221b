"""The value of vLLM's `--kv-transfer-config` for each role, and the connector's own options in it."""

import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

Role = Literal["prefill", "decode"]

CONNECTOR_CLASS = "LockstepPushConnector"
CONNECTOR_MODULE = "kv_transfer.connector"
CONNECTOR_VERSION = "4"
"""Of our notices and our kv_transfer_params; nodes of another version are not paired."""
# vLLM's `worker_extension_cls`: answers `collective_rpc("lockstep_kv_counters")`.
WORKER_EXTENSION_CLASS = "kv_transfer.worker_rpc.KVWorkerExtension"

_KV_ROLE: dict[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}
_OWN_PREFIX = "lockstep_"


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """The keys of `kv_connector_extra_config` that are ours. Every other key is vLLM's and stays its own."""

    nixl_progress_delay_us: int = 2000
    """Longest sleep of NIXL's progress thread in poll(), in whole milliseconds; events wake it earlier.

    0 spins and burns a core per engine; 1000 costs an idle engine 2.6 % of a core, 2000 1.8 %.
    """
    lockstep_stream_chunks: bool = True
    """Push while the prompt is computed; if not, everything goes at its end."""
    lockstep_park: bool = True
    """Engines that only wait for KV stop stepping, and are woken (lockstep/node/parking)."""
    lockstep_registration_deadline_s: float = 60.0
    """A decode request whose KV has not arrived this long after its blocks were registered fails."""
    lockstep_cancel_ack_timeout_s: float = 5.0
    """Without prefill's answer to a cancel after this long, decode's blocks count as quarantined."""
    lockstep_stall_patience_s: float = 1.0
    """A decode rank that runs nothing and finds no blocks for this long asks prefill what can be done."""
    lockstep_tombstone_ttl_s: float = 180.0
    """How long prefill remembers that nothing will be pushed for a request."""
    lockstep_tombstone_limit: int = 65536
    """How many such requests prefill remembers; the oldest goes first."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is bool:
                if not isinstance(value, bool):
                    raise ValueError(
                        f"kv_connector_extra_config.{field.name} must be true or false, not {value!r}"
                    )
                continue
            numbers = (int,) if field.type is int else (int, float)
            if isinstance(value, bool) or not isinstance(value, numbers):
                raise ValueError(f"kv_connector_extra_config.{field.name} must be a number, not {value!r}")
            zero_is_fine = field.name == "nixl_progress_delay_us"
            if value < 0 or (value == 0 and not zero_is_fine):
                raise ValueError(f"kv_connector_extra_config.{field.name} must be positive, not {value!r}")

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> "ConnectorOptions":
        """Read our keys. Raises ValueError for a bad value or an unknown key that has our prefix."""
        names = {field.name for field in fields(cls)}
        if unknown := sorted(key for key in extra if key.startswith(_OWN_PREFIX) and key not in names):
            raise ValueError(f"kv_connector_extra_config.{unknown[0]} is not known")
        return cls(**{name: extra[name] for name in names if name in extra})


def kv_transfer_config(
    role: Role,
    *,
    kv_buffer_device: str,
    engine_id: str | None = None,
    extra_config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Build the JSON object for `--kv-transfer-config` (vllm/config/kv_transfer.py).

    A new engine id at each start, so that nothing meant for an earlier process reaches this one. Raises
    ValueError for options that `ConnectorOptions` refuses.
    """
    extra = dict(extra_config or {})
    options = ConnectorOptions.from_extra_config(extra)
    return {
        "kv_connector": CONNECTOR_CLASS,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": _KV_ROLE[role],
        "engine_id": engine_id or str(uuid.uuid4()),
        "kv_buffer_device": kv_buffer_device,
        # "recompute" would run a prefill on a decode rank.
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": extra | asdict(options),
    }
