"""Sets what a machine without an accelerator needs in the environment, before vLLM is first imported."""

import os
from importlib import metadata

_DEFAULTS = {
    # Turns on decode_node.cpu_platform, by vLLM's plugin entry point.
    "LOCKSTEP_CPU_PLATFORM": "1",
    # One thread an engine: its rank has one core (docs/architecture.md, "One machine, no accelerator").
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # oneDNN keeps a matrix product for each number of tokens that a step has had. By its own default, 1024 of
    # them, an engine that computes prompts of all lengths grows by half a gigabyte; with this by 150 MiB.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
}


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the CPU build, which is a distribution of its own."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def assign_cores(num_local_ranks: int) -> None:
    """Give each local rank a core of its own, unless the user chose or there are too few.

    Two ranks on one core would each wait a scheduling quantum in every exchange.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= num_local_ranks:
        os.environ.setdefault("LOCKSTEP_CPU_CORES", ",".join(map(str, cores[:num_local_ranks])))


def prepare() -> None:
    """Fill in the defaults on a CPU build; what is set already stays."""
    if is_cpu_build():
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
