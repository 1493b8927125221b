"""NIXL's progress thread in the peers' engines: as it comes, spinning, or put to sleep by a patch of ours.

NIXL's Python API sets its delay to 0 (nixl_cu12/_api.py, `nixl_agent.__init__`), and no setting of vLLM
changes that: the thread of each engine takes a core, idle or not. On two cores the engines of a pair then
starve each other, for minutes at a time. Users of the peers have that; the patch shows what else there is.
"""

from collections.abc import Mapping
from pathlib import Path

from bench.harness import NIXL_PROGRESS_PLUGIN, write_vllm_plugin

PLUGIN = "sleeping_progress"


def environment(directory: Path, asleep: bool, *packages: Path) -> Mapping[str, str]:
    """For an engine that finds `packages` before the installed ones."""
    folders = [str(folder) for folder in packages]
    if not asleep:
        return {"PYTHONPATH": ":".join(folders)} if folders else {}
    site = directory / "site"
    if not site.exists():
        write_vllm_plugin(site, PLUGIN, NIXL_PROGRESS_PLUGIN)
    return {"PYTHONPATH": ":".join([*folders, str(site)]), "VLLM_PLUGINS": PLUGIN}
