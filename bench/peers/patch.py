"""What the rows called patched change in the peers' engines, so that two cores are shared as more would be.

Both are what vLLM's NIXL connector does on a CPU, whatever stands before it:

* NIXL's progress thread spins. Its Python API sets the delay to 0 (nixl_cu12/_api.py, `nixl_agent.__init__`),
  and no setting of vLLM changes that: each engine takes a core for it, idle or not. Patched, it sleeps.
* The thread that makes the connector is put on the last core of its NUMA node (nixl/base_worker.py:714). With
  one OpenMP thread that is the one that runs the model, and NIXL's inherits it: both engines of a pair, and
  all that spins in them, share one core while the other is free. Patched, the thread keeps its cores.

Users of the peers have both; without them it shows what else there is. The text of the plugins stands alone:
nothing of Lockstep runs in a peer.
"""

from collections.abc import Mapping
from pathlib import Path

from bench.harness import NIXL_PROGRESS_PLUGIN, write_vllm_plugin

_KEPT_CORES_PLUGIN = """
import functools
import os


def register():
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

    make = NixlBaseConnectorWorker.__init__
    if hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def make_and_go_back(self, *args, **kwargs):
        cores = os.sched_getaffinity(0)
        make(self, *args, **kwargs)
        os.sched_setaffinity(0, cores)

    NixlBaseConnectorWorker.__init__ = make_and_go_back
"""

_PLUGINS = {"sleeping_progress": NIXL_PROGRESS_PLUGIN, "kept_cores": _KEPT_CORES_PLUGIN}


def environment(directory: Path, patched: bool, *packages: Path) -> Mapping[str, str]:
    """For an engine that finds `packages` before the installed ones."""
    folders = [str(folder) for folder in packages]
    if not patched:
        return {"PYTHONPATH": ":".join(folders)} if folders else {}
    site = directory / "site"
    if not site.exists():
        for name, source in _PLUGINS.items():
            write_vllm_plugin(site, name, source)
    return {"PYTHONPATH": ":".join([*folders, str(site)]), "VLLM_PLUGINS": ",".join(_PLUGINS)}
