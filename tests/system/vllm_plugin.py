"""Gives the vLLM servers of a test or benchmark a plugin that no installed package has."""

from pathlib import Path


def write_vllm_plugin(site: Path, name: str, source: str) -> None:
    """Lay out module `name`, whose `register` vLLM is to call, as `importlib.metadata` knows a distribution.

    `site` goes on the servers' PYTHONPATH.
    """
    info = site / f"{name}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {name}:register\n")
    (site / f"{name}.py").write_text(source)
