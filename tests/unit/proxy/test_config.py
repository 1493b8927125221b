"""The proxy's own flags."""

import pytest

from lockstep.errors import ConfigError
from proxy.config import ProxyConfig


def load(*flags: str) -> ProxyConfig:
    return ProxyConfig.load(flags, "lockstep proxy", "")[0]


def test_addresses_in_the_order_given() -> None:
    """Names, addresses of both families, and spaces after the comma."""
    config = load("--prefill", "a:1,b.example:2", "--decode", "10.0.0.1:3, [::1]:4")
    assert config.prefill_addresses == ("a:1", "b.example:2")
    assert config.decode_addresses == ("10.0.0.1:3", "[::1]:4")


@pytest.mark.parametrize("value", ["a", "a:", "a:0", "a:70000", "", "a:1,", "::1:5", "a:1,a:1", "http://a:1"])
def test_bad_address_is_refused_by_flag(value: str) -> None:
    """The message names the flag."""
    with pytest.raises(ConfigError, match="--prefill"):
        load("--prefill", value, "--decode", "d:1")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--prefill-window-tokens", "0"),
        ("--request-timeout-s", "0"),
        ("--drain-timeout-s", "-1"),
        ("--max-attempts", "0"),
        ("--admin-port", "0"),
        ("--workers", "0"),
        ("--workers", "65"),
    ],
)
def test_bad_number_is_refused_by_flag(flag: str, value: str) -> None:
    """The message names the flag."""
    with pytest.raises(ConfigError, match=flag):
        load("--prefill", "p:1", "--decode", "d:1", flag, value)


def test_each_worker_needs_an_admin_port() -> None:
    """They take the ports that follow; the message says how high the first one may be."""
    flags = ("--prefill", "p:1", "--decode", "d:1", "--workers", "3", "--admin-port")
    assert load(*flags, "65533").admin_port == 65533
    with pytest.raises(ConfigError, match=r"--admin-port: .* give one up to 65533"):
        load(*flags, "65534")


def test_flags_of_vllm_are_left_over() -> None:
    """They go to vLLM's own parser as they are."""
    _, rest = ProxyConfig.load(
        ["--prefill", "p:1", "--decode", "d:1", "--port", "9", "--api-key", "k"], "lockstep proxy", ""
    )
    assert rest == ["--port", "9", "--api-key", "k"]
