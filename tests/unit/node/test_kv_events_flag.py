"""--kv-events of a prefill node, and what it makes of vLLM's own flag."""

import os
from pathlib import Path

import pytest
from vllm.config import KVEventsConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from lockstep.errors import ConfigError
from prefill_node.config import PrefillConfig
from prefill_node.service import ROLE

PICO = str(Path(__file__).parents[3] / "models" / "pico")
INT_HASHES = "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"


def applied(config: PrefillConfig, given: KVEventsConfig | None = None) -> AsyncEngineArgs:
    args = AsyncEngineArgs(model=PICO, kv_events_config=given)
    ROLE.apply_flags(args, config)
    return args


def test_engine_makes_events_with_whole_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published to nobody but us; the engine processes inherit the variable."""
    monkeypatch.setenv(INT_HASHES, "1")
    events = applied(PrefillConfig()).kv_events_config
    assert events is not None
    assert (events.enable_kv_cache_events, events.publisher) == (True, "null")
    assert os.environ[INT_HASHES] == "0"
    assert ROLE.tells_kv_events(PrefillConfig())


def test_off_leaves_the_engine_as_it_is() -> None:
    config = PrefillConfig(kv_events="off")
    assert applied(config).kv_events_config is None
    assert not ROLE.tells_kv_events(config)


def test_events_of_the_users_own_are_kept_if_their_hashes_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default they are cut to integers, which the refusal names."""
    given = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq")
    monkeypatch.delenv(INT_HASHES, raising=False)
    with pytest.raises(ConfigError, match=rf"--kv-events-config: .* set {INT_HASHES}=0, or give --kv-events"):
        applied(PrefillConfig(), given)
    monkeypatch.setenv(INT_HASHES, "0")
    assert applied(PrefillConfig(), given).kv_events_config is given


def test_wrong_value_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"--kv-events: Input should be 'on' or 'off'"):
        PrefillConfig.load(["--kv-events", "yes"], "lockstep prefill", "")
