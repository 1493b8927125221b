"""Which GPUs the nodes of `lockstep up` get, and which wishes are refused by the option's name."""

import pytest

from lockstep.cli.devices import Placement, place
from lockstep.cli.machine import Device, Machine
from lockstep.errors import ConfigError

CPU = Machine(device=Device.CPU, cores=(0, 1), gpus=("0",))


def cuda(num_gpus: int) -> Machine:
    return Machine(device=Device.CUDA, cores=(0, 1), gpus=tuple(str(gpu) for gpu in range(num_gpus)))


@pytest.mark.parametrize(
    ("prefill", "decode", "ranks", "expected"),
    [
        (None, None, None, Placement(("0",), ("1", "2"), 2)),
        (None, None, 3, Placement(("0",), ("1", "2", "3"), 3)),
        ("0", "1,2", None, Placement(("0",), ("1", "2"), 2)),
        ("2,3", "0, 1", 1, Placement(("2", "3"), ("0", "1"), 1)),
        ("1", None, None, Placement(("1",), ("0", "2"), 2)),
        (None, "0", None, Placement(("1",), ("0",), 1)),
        ("0", "0", None, Placement(("0",), ("0",), 1)),
    ],
)
def test_gpus(prefill: str | None, decode: str | None, ranks: int | None, expected: Placement) -> None:
    """What is given counts; the rest is the first that are free, one a decode rank."""
    assert place(prefill, decode, ranks, cuda(4)) == expected


@pytest.mark.parametrize(
    ("prefill", "decode", "ranks", "refusal"),
    [
        ("4", None, None, "--prefill-devices: there is no GPU '4' here; there are 0, 1, 2"),
        ("0", "1,x", None, "--decode-devices: there is no GPU 'x' here"),
        ("0", "", None, "--decode-devices: there is no GPU '' here"),
        ("0", "1,1", None, "--decode-devices: a GPU is listed twice in 1,1"),
        ("0", "1,2", 3, "--decode-devices: 2 GPUs cannot be shared out evenly among 3 ranks"),
        ("0,1,2", None, None, "--decode-devices: 2 free GPUs are needed, 0 left"),
        (None, "0,1,2", None, "--prefill-devices: 1 free GPUs are needed, 0 left"),
    ],
)
def test_refusals(prefill: str | None, decode: str | None, ranks: int | None, refusal: str) -> None:
    """A wrong or missing choice names its option and what there is."""
    with pytest.raises(ConfigError) as refused:
        place(prefill, decode, ranks, cuda(3))
    assert str(refused.value).startswith(refusal)


def test_cpu() -> None:
    """No GPUs on a CPU, and two ranks unless told otherwise."""
    assert place(None, None, None, CPU) == Placement((), (), 2)
    assert place(None, None, 4, CPU) == Placement((), (), 4)


@pytest.mark.parametrize(
    ("flag", "given"), [("--prefill-devices", ("0", None)), ("--decode-devices", (None, "0"))]
)
def test_gpus_are_refused_on_a_cpu(flag: str, given: tuple[str | None, str | None]) -> None:
    """They would be ignored there."""
    with pytest.raises(ConfigError, match=f"^{flag}: the engines run on the CPU here"):
        place(*given, None, CPU)
