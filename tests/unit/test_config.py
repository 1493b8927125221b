"""Service configuration: flags over environment over defaults, and nothing mistyped passes."""

import os
import subprocess
import sys

import pytest

from decode_node.config import DecodeConfig
from lockstep.config import SHARED_ENVIRONMENT, ServiceConfig, known_variables
from lockstep.errors import ConfigError
from lockstep.node.config import NodeConfig
from lockstep.sim.config import SimFigures
from prefill_node.config import PrefillConfig
from proxy.config import ProxyConfig


def load(*argv: str) -> tuple[NodeConfig, list[str]]:
    return NodeConfig.load(argv, "lockstep decode", "")


def test_flags_win_over_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag, then LOCKSTEP_<FIELD>, then the default."""
    monkeypatch.setenv("LOCKSTEP_PORT", "7001")
    monkeypatch.setenv("LOCKSTEP_HTTP_PORT", "7002")
    config, _ = load("--port", "8001")
    assert (config.port, config.http_port, config.side_channel_port) == (8001, 7002, 5600)


def test_flags_of_vllm_are_left_over() -> None:
    """What is not ours goes to vLLM in its order, the model first."""
    _, rest = load("models/pico", "--port=8001", "--dtype", "float32", "--max-num-seqs", "4")
    assert rest == ["models/pico", "--dtype", "float32", "--max-num-seqs", "4"]


def test_abbreviated_flags_are_not_ours() -> None:
    """`--por 1` must not become --port: vLLM's parser is the one to refuse it."""
    config, rest = load("--por", "1")
    assert config.port == 50051
    assert rest == ["--por", "1"]


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (("--port", "70000"), "--port"),
        (("--port", "x"), "--port"),
        (("--side-channel-host", "0.0.0.0"), "--side-channel-host"),
        (("--side-channel-host", "::"), "--side-channel-host"),
        (("--nixl-progress-delay-us", "-1"), "--nixl-progress-delay-us"),
        (("--log-level", "LOUD"), "--log-level"),
    ],
)
def test_bad_value_names_its_flag(argv: tuple[str, ...], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        load(*argv)


def test_mistyped_environment_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """LOCKSTEP_PROT would otherwise do nothing, silently."""
    monkeypatch.setenv("LOCKSTEP_PROT", "7001")
    with pytest.raises(ConfigError, match="LOCKSTEP_PROT"):
        load()


def test_known_variables_are_those_of_all_services() -> None:
    """Each service's fields, what the CPU platform reads, and nothing of a test's own."""
    services = (NodeConfig, PrefillConfig, DecodeConfig, SimFigures, ProxyConfig)
    fields = {name for service in services for name in service.model_fields}
    assert known_variables() == SHARED_ENVIRONMENT | {f"LOCKSTEP_{name.upper()}" for name in fields}


@pytest.mark.parametrize("config", [NodeConfig, DecodeConfig, ProxyConfig])
def test_one_environment_serves_all_services(config: type[ServiceConfig]) -> None:
    """A process of one service passes over the others' variables and gets as far as its own wrong value."""
    code = f"""
import sys
from {config.__module__} import {config.__name__}
from lockstep.errors import ConfigError
try:
    {config.__name__}.load([], "", "")
except ConfigError as error:
    print(error)
assert "vllm" not in sys.modules, "flags are read without vLLM, whose import takes seconds"
"""
    of_nodes = {"LOCKSTEP_HTTP_PORT": "none", "LOCKSTEP_STRICT": "true", "LOCKSTEP_KV_LEASE_S": "40"}
    of_the_proxy = {"LOCKSTEP_PREFILL": "none", "LOCKSTEP_HAND_OFF": "off"}
    # A process of its own: this one has loaded the flags of all three.
    answer = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ | of_nodes | of_the_proxy,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert answer.stdout.startswith("--prefill: " if config is ProxyConfig else "--http-port: ")


def test_configuration_is_frozen() -> None:
    config, _ = load()
    with pytest.raises(ValueError, match="frozen"):
        config.port = 1  # type: ignore[misc]
