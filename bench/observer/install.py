"""Owns how the observer gets into the systems under test: a distribution of its own on their PYTHONPATH."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from bench.observer import plugin

DISTRIBUTION = "lockstep_bench_observer"


def write_distribution(directory: Path) -> None:
    """Lay out what `importlib.metadata` takes for an installed package with a vLLM plugin."""
    shutil.copyfile(plugin.__file__, directory / f"{DISTRIBUTION}.py")
    info = directory / f"{DISTRIBUTION}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\nobserver = {DISTRIBUTION}:register\n")


@contextlib.contextmanager
def observed(directory: Path) -> Iterator[Path]:
    """Have every engine that is started inside write what it agrees to; yields where."""
    site, records = directory / "site", directory / "records"
    site.mkdir(parents=True)
    records.mkdir()
    write_distribution(site)
    old = {name: os.environ.get(name) for name in ("PYTHONPATH", plugin.DIRECTORY_ENV)}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), old["PYTHONPATH"])))
    os.environ[plugin.DIRECTORY_ENV] = str(records)
    try:
        yield records
    finally:
        for name, value in old.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
