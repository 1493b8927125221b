"""The decode node's own flags, and what they become in the engine core's configuration."""

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from unit.decode.resolved import PICO, decode_args, graph_platform, resolved
from vllm.engine.arg_utils import AsyncEngineArgs

from decode_node.config import ASYNC_SCHEDULER, SYNC_SCHEDULER, DecodeConfig
from decode_node.scheduler import LockstepScheduler, LockstepSyncScheduler
from decode_node.scheduler.settings import SchedulerSettings
from decode_node.service import GPU_WORKER, ROLE
from lockstep.errors import ConfigError
from lockstep.node import arguments


@pytest.fixture(autouse=True)
def _platform() -> Iterator[None]:
    with graph_platform():
        yield


def load(*argv: str) -> DecodeConfig:
    config, _ = arguments.load(ROLE, [str(PICO), *argv])
    assert isinstance(config, DecodeConfig)
    return config


def test_defaults_are_lockstep() -> None:
    """Nothing has to be given for it."""
    config = load()
    assert (config.scheduler, config.arrival_padding, config.strict) == ("lockstep", "on", False)


def test_flags_without_a_value() -> None:
    """--strict and --i-know; what follows them is not taken for their value."""
    config = load("--strict", "--i-know", "--port", "7000")
    assert (config.strict, config.i_know, config.port) == (True, True, 7000)


def test_prefill_has_none_of_them() -> None:
    """vLLM's parser refuses what is not ours there."""
    from prefill_node.service import ROLE as PREFILL

    with pytest.raises(SystemExit):
        arguments.load(PREFILL, [str(PICO), "--strict"])


@pytest.mark.parametrize(
    ("flags", "named"),
    [({"scheduler": "stock"}, "--scheduler stock"), ({"arrival_padding": "off"}, "--arrival")],
)
def test_flags_of_the_benchmark_are_refused_without_i_know(flags: dict[str, Any], named: str) -> None:
    """The message names the flag and says what it is there for."""
    with pytest.raises(
        ConfigError, match=f"^{named}.* only to reproduce the fault for the benchmark"
    ) as raised:
        decode_args({}, **flags)
    assert "--i-know" in str(raised.value)
    decode_args({}, **flags, i_know=True)


@pytest.mark.parametrize("flags", [{"strict": True}, {"arrival_padding": "off"}])
def test_flags_that_the_stock_scheduler_does_not_know_are_refused(flags: dict[str, Any]) -> None:
    """They would do nothing, silently."""
    with pytest.raises(ConfigError, match="remove --scheduler stock"):
        decode_args({}, scheduler="stock", i_know=True, **flags)


@pytest.mark.parametrize(
    ("flags", "name", "cls"),
    [
        ({}, ASYNC_SCHEDULER, LockstepScheduler),
        ({"async_scheduling": True}, ASYNC_SCHEDULER, LockstepScheduler),
        ({"async_scheduling": False}, SYNC_SCHEDULER, LockstepSyncScheduler),
    ],
)
def test_engine_core_gets_our_scheduler(flags: dict[str, Any], name: str, cls: type) -> None:
    """By a name that vLLM resolves to it."""
    config = resolved(flags)
    assert config.scheduler_config.scheduler_cls == name
    assert config.scheduler_config.get_scheduler_cls() is cls


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ({}, SchedulerSettings(strict=False, arrival_padding=True)),
        ({"strict": True}, SchedulerSettings(strict=True, arrival_padding=True)),
        ({"arrival_padding": "off", "i_know": True}, SchedulerSettings(strict=False, arrival_padding=False)),
    ],
)
def test_settings_reach_the_scheduler(flags: dict[str, Any], settings: SchedulerSettings) -> None:
    """Through the configuration as it is sent to the engine core, beside what the user put there."""
    config = resolved({"additional_config": {"mine": 1}}, **flags)
    sent = pickle.loads(pickle.dumps(config))
    assert SchedulerSettings.from_config(sent) == settings
    assert sent.additional_config["mine"] == 1


def test_settings_are_not_taken_from_the_user() -> None:
    """The flags are the way to them."""
    with pytest.raises(ConfigError, match=r"^--additional-config: Lockstep sets 'lockstep'"):
        decode_args({"additional_config": {"lockstep": {"strict": True}}})


def test_stock_schedules_as_vllm_does() -> None:
    """It gets nothing of ours but the tokens of earlier attempts, which the runner gets anyway."""
    config = resolved({}, scheduler="stock", i_know=True)
    assert config.scheduler_config.scheduler_cls == "kv_transfer.carried.vllm_schedulers.make_scheduler"
    assert config.additional_config == {}


def test_speculation_without_a_number_is_refused() -> None:
    """The graphs are chosen before vLLM would take K from the model."""
    with pytest.raises(ConfigError, match=r"^--speculative-config: num_speculative_tokens is missing"):
        decode_args({"speculative_config": {"method": "mtp"}})


def test_lease_and_deadline_reach_the_connector() -> None:
    """Of both roles; vLLM's key for the one, ours for the other."""
    extra = resolved(
        {}, kv_lease_s=42, registration_deadline_s=7.5
    ).kv_transfer_config.kv_connector_extra_config
    assert extra["kv_lease_duration"] == 42
    assert extra["lockstep_registration_deadline_s"] == 7.5


def test_too_short_a_lease_is_refused() -> None:
    """vLLM renews it each sixth of it, in whole seconds."""
    with pytest.raises(ConfigError, match="--kv-lease-s"):
        load("--kv-lease-s", "5")


@pytest.mark.parametrize(("given", "expected"), [("auto", GPU_WORKER), ("mine.Worker", "mine.Worker")])
def test_cuda_gets_the_worker_that_records(
    monkeypatch: pytest.MonkeyPatch, given: str, expected: str
) -> None:
    """Unless the user chose one."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    args = AsyncEngineArgs(model=str(PICO), worker_cls=given)
    ROLE.apply_flags(args, DecodeConfig())
    assert args.worker_cls == expected
