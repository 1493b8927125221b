"""Decides which GPUs each node of `lockstep up` gets, and how many decode ranks there are; pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.cli.machine import Device, Machine
from lockstep.errors import ConfigError

DECODE_RANKS = 2
"""Where neither the ranks nor their GPUs are given."""

_PREFILL, _DECODE, _RANKS = "--prefill-devices", "--decode-devices", "--decode-ranks"


@dataclass(frozen=True, slots=True)
class Placement:
    """GPUs as nvidia-smi lists them; none on a CPU."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    decode_ranks: int

    @property
    def shared(self) -> bool:
        """Whether a GPU holds both nodes."""
        return bool(set(self.prefill) & set(self.decode))


def place(prefill: str | None, decode: str | None, decode_ranks: int | None, machine: Machine) -> Placement:
    """Read the three options; a node is tensor parallel over the GPUs of one rank.

    Raises ConfigError naming the option that is wrong or missing.
    """
    if machine.device is not Device.CUDA:
        for flag, given in ((_PREFILL, prefill), (_DECODE, decode)):
            if given is not None:
                raise ConfigError(
                    f"{flag}: the engines run on the CPU here; remove it, or give --device cuda"
                )
        return Placement((), (), decode_ranks or DECODE_RANKS)
    for_prefill = None if prefill is None else _devices(_PREFILL, prefill, machine.gpus)
    for_decode = None if decode is None else _devices(_DECODE, decode, machine.gpus)
    ranks = decode_ranks or len(for_decode or ()) or DECODE_RANKS
    if for_decode is not None and len(for_decode) % ranks:
        raise ConfigError(
            f"{_DECODE}: {len(for_decode)} GPUs cannot be shared out evenly among {ranks} ranks; "
            f"give a multiple, or another {_RANKS}"
        )
    for_prefill = for_prefill or _free(_PREFILL, 1, for_decode or (), machine.gpus)
    for_decode = for_decode or _free(_DECODE, ranks, for_prefill, machine.gpus)
    return Placement(for_prefill, for_decode, ranks)


def _devices(flag: str, given: str, gpus: Sequence[str]) -> tuple[str, ...]:
    devices = tuple(part.strip() for part in given.split(","))
    for device in devices:
        if device not in gpus:
            raise ConfigError(f"{flag}: there is no GPU {device!r} here; {_those(gpus)}")
    if len(set(devices)) != len(devices):
        raise ConfigError(f"{flag}: a GPU is listed twice in {given}")
    return devices


def _free(flag: str, count: int, taken: Sequence[str], gpus: Sequence[str]) -> tuple[str, ...]:
    free = tuple(gpu for gpu in gpus if gpu not in taken)
    if len(free) < count:
        raise ConfigError(
            f"{flag}: {count} free GPUs are needed, {len(free)} left; {_those(gpus)}. "
            f"To put both nodes on one GPU, say so: {_PREFILL} 0 {_DECODE} 0"
        )
    return free[:count]


def _those(gpus: Sequence[str]) -> str:
    return f"there are {', '.join(gpus)}" if gpus else "there is none"
