"""What a node refuses or fills in before any engine starts."""

import os
from collections.abc import Iterator

import pytest

from lockstep import health
from lockstep.errors import ConfigError
from lockstep.node import cpu_environment
from lockstep.node.arguments import check_side_channel_ports


@pytest.fixture
def taken_port() -> Iterator[int]:
    with health.bind("127.0.0.1", 0, "--port") as sock:
        sock.listen()
        yield sock.getsockname()[1]


def test_busy_side_channel_port_is_refused(monkeypatch: pytest.MonkeyPatch, taken_port: int) -> None:
    """The second rank's port is taken: the message names the flag, the rank and the port."""
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(taken_port - 1))
    with pytest.raises(ConfigError, match=rf"--side-channel-port \(rank 1\).*127.0.0.1:{taken_port}"):
        check_side_channel_ports(0, 2)


def test_a_side_channel_host_of_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """192.0.2.1 is reserved for documentation: no interface here has it."""
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "192.0.2.1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
    with pytest.raises(ConfigError, match="--side-channel-host"):
        check_side_channel_ports(0, 1)


def test_side_channel_ports_end_at_65535(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "65535")
    with pytest.raises(ConfigError, match="--side-channel-port"):
        check_side_channel_ports(1, 1)


@pytest.mark.parametrize(
    ("cores", "ranks", "given", "expected"),
    [
        ({0, 1, 5}, 2, None, "0,1"),
        ({4, 2}, 2, None, "2,4"),
        ({0}, 2, None, None),
        ({0, 1}, 2, "1,0", "1,0"),
    ],
)
def test_each_rank_gets_a_core(
    monkeypatch: pytest.MonkeyPatch, cores: set[int], ranks: int, given: str | None, expected: str | None
) -> None:
    """One core a rank where there are enough, and never over what the user chose."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    # setenv first, so that what the code itself sets is undone as well.
    monkeypatch.setenv("LOCKSTEP_CPU_CORES", given or "")
    if given is None:
        monkeypatch.delenv("LOCKSTEP_CPU_CORES")
    cpu_environment.assign_cores(ranks)
    assert os.environ.get("LOCKSTEP_CPU_CORES") == expected


def test_what_is_set_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU build the rest is filled in; else nothing."""
    for name in ("OMP_NUM_THREADS", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        monkeypatch.setenv(name, "7")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    monkeypatch.setattr(cpu_environment, "is_cpu_build", lambda: False)
    cpu_environment.prepare()
    assert "ONEDNN_PRIMITIVE_CACHE_CAPACITY" not in os.environ
    monkeypatch.setattr(cpu_environment, "is_cpu_build", lambda: True)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    cpu_environment.prepare()
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "256"
