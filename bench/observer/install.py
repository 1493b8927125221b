"""Owns how the observer gets into the systems under test: a distribution of its own on their PYTHONPATH."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from bench.harness import write_vllm_plugin
from bench.observer import plugin as agreement_plugin

DISTRIBUTION = "lockstep_bench_observer"


@contextlib.contextmanager
def observed(directory: Path, plugin: ModuleType = agreement_plugin) -> Iterator[Path]:
    """Have every engine that is started inside write what the plugin notes; yields where."""
    site, records = directory / "site", directory / "records"
    records.mkdir(parents=True)
    write_vllm_plugin(site, DISTRIBUTION, Path(plugin.__file__).read_text())
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
