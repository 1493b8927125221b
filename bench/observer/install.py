"""Owns how the observer gets into the systems under test: a distribution of its own on their PYTHONPATH."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType

from bench.harness import write_vllm_plugin
from bench.observer import plugin as agreement_plugin

DISTRIBUTION = "lockstep_bench_observer"


@contextlib.contextmanager
def observed(
    directory: Path,
    plugin: ModuleType = agreement_plugin,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Path]:
    """Have every engine that is started inside write what the plugin notes; yields where.

    `environment`: what else the plugin reads.
    """
    site, records = directory / "site", directory / "records"
    records.mkdir(parents=True)
    write_vllm_plugin(site, DISTRIBUTION, Path(plugin.__file__).read_text())
    names = ("PYTHONPATH", plugin.DIRECTORY_ENV, *environment)
    old = {name: os.environ.get(name) for name in names}
    os.environ.update(environment)
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
