"""What `lockstep up` finds out about the machine."""

import importlib.metadata
import os
from pathlib import Path

import pytest

from lockstep.cli.machine import Device, inspect_machine
from lockstep.errors import ConfigError


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.fixture(autouse=True)
def no_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("cuda_build")
@pytest.mark.parametrize(
    ("nodes", "device"),
    [
        ([], Device.CPU),
        (["nvidiactl", "nvidia-uvm"], Device.CPU),
        (["nvidiactl", "nvidia0"], Device.CUDA),
    ],
    ids=["none", "driver only", "a GPU"],
)
def test_auto(tmp_path: Path, nodes: list[str], device: Device) -> None:
    """A numbered NVIDIA device means CUDA; the driver's other files do not."""
    for node in nodes:
        (tmp_path / node).touch()
    assert inspect_machine(Device.AUTO, tmp_path).device is device


def test_cpu_build_runs_on_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CPU build of vLLM installed, a GPU in the machine changes nothing."""
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.32.0")
    (tmp_path / "nvidia0").touch()
    assert inspect_machine(Device.AUTO, tmp_path).device is Device.CPU


def test_cuda_on_the_cpu_build_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would run on the CPU without a word."""
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.32.0")
    with pytest.raises(ConfigError, match="--device cuda"):
        inspect_machine(Device.CUDA, tmp_path)


@pytest.mark.usefixtures("cuda_build")
def test_gpus_are_those_of_the_driver(tmp_path: Path) -> None:
    """By number, not by name: 10 comes after 2."""
    for node in ("nvidiactl", "nvidia10", "nvidia2", "nvidia0"):
        (tmp_path / node).touch()
    assert inspect_machine(Device.AUTO, tmp_path).gpus == ("0", "2", "10")


@pytest.mark.usefixtures("cuda_build")
@pytest.mark.parametrize(("visible", "gpus"), [("3,1", ("3", "1")), ("", ()), ("-1", ())])
def test_gpus_are_those_that_cuda_may_see(
    visible: str, gpus: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA_VISIBLE_DEVICES takes the others away, all of them if it is empty."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert inspect_machine(Device.AUTO, tmp_path).gpus == gpus


def test_cores_are_those_this_process_may_use() -> None:
    """Not all of the machine: a container or taskset may allow fewer."""
    assert inspect_machine(Device.CPU).cores == tuple(sorted(os.sched_getaffinity(0)))
