"""`--kv-transfer-config` for each role, and the connector's own options."""

from typing import Any

import pytest

from kv_transfer.config import ConnectorOptions, kv_transfer_config


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_role_becomes_vllms_kv_role(role: Any, kv_role: str) -> None:
    """Prefill produces, decode consumes; neither is vLLM's deprecated kv_both."""
    assert kv_transfer_config(role, kv_buffer_device="cpu")["kv_role"] == kv_role


def test_config_loads_our_class_and_fails_lost_loads() -> None:
    """Our connector by module path; a lost load is an error, never a prefill on decode."""
    config = kv_transfer_config("decode", kv_buffer_device="cpu", engine_id="e1")
    assert config | {"kv_connector_extra_config": None} == {
        "kv_connector": "LockstepPushConnector",
        "kv_connector_module_path": "kv_transfer.connector",
        "kv_role": "kv_consumer",
        "engine_id": "e1",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": None,
    }


def test_engine_id_is_new_at_each_start() -> None:
    """Two starts of the same node are two engines."""
    first, second = (kv_transfer_config("prefill", kv_buffer_device="cpu") for _ in range(2))
    assert first["engine_id"] != second["engine_id"]


def test_progress_thread_sleeps_by_default() -> None:
    """2000 µs unless asked otherwise."""
    config = kv_transfer_config("prefill", kv_buffer_device="cpu")
    assert config["kv_connector_extra_config"]["nixl_progress_delay_us"] == 2000


def test_vllms_own_extra_options_pass_through() -> None:
    """Keys without our prefix belong to vLLM."""
    extra = {"kv_lease_duration": 60, "nixl_progress_delay_us": 0}
    config = kv_transfer_config("prefill", kv_buffer_device="cpu", extra_config=extra)
    assert config["kv_connector_extra_config"].items() >= extra.items()


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"lockstep_registration_dedline_s": 5}, "lockstep_registration_dedline_s"),
        ({"lockstep_registration_deadline_s": 0}, "lockstep_registration_deadline_s"),
        ({"lockstep_cancel_ack_timeout_s": "5"}, "lockstep_cancel_ack_timeout_s"),
        ({"lockstep_tombstone_limit": 2.5}, "lockstep_tombstone_limit"),
        ({"nixl_progress_delay_us": -1}, "nixl_progress_delay_us"),
        ({"nixl_progress_delay_us": True}, "nixl_progress_delay_us"),
    ],
)
def test_bad_options_are_refused_by_name(extra: dict[str, Any], field: str) -> None:
    """A mistyped or impossible option stops the start and is named."""
    with pytest.raises(ValueError, match=field):
        kv_transfer_config("decode", kv_buffer_device="cpu", extra_config=extra)


def test_options_are_read_back_from_the_config() -> None:
    """What the connector reads is what the node wrote."""
    extra = {"lockstep_registration_deadline_s": 7.5, "lockstep_tombstone_limit": 10}
    config = kv_transfer_config("decode", kv_buffer_device="cpu", extra_config=extra)
    options = ConnectorOptions.from_extra_config(config["kv_connector_extra_config"])
    assert options == ConnectorOptions(lockstep_registration_deadline_s=7.5, lockstep_tombstone_limit=10)
