"""Service configuration: flags over environment over defaults, and nothing mistyped passes."""

import pytest

from lockstep.errors import ConfigError
from lockstep.node.config import NodeConfig


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


def test_configuration_is_frozen() -> None:
    config, _ = load()
    with pytest.raises(ValueError, match="frozen"):
        config.port = 1  # type: ignore[misc]
