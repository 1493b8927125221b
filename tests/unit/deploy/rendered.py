"""What the tests of deploy/ read: manifests as kubectl renders them, compose files as they are written."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
OVERLAYS = ("cpu-demo", "gpu-1p1d", "gpu-2p-dp8ep")

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """A workload's pods; `role` is prefill, decode or proxy."""

    kind: str
    name: str
    role: str
    template: Object

    @property
    def spec(self) -> Object:
        return dict(self.template["spec"])

    @property
    def container(self) -> Object:
        (container,) = self.spec["containers"]
        return dict(container)


def require_kustomize() -> None:
    """Skip the test where no kubectl, or one from before components, is there to render with."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed, so the manifests cannot be rendered")
    told = _kubectl("version", "--client", "--output=json")
    version = json.loads(told).get("kustomizeVersion", "v2")  # kubectl before 1.25 does not tell, and has 2.0
    if int(version.removeprefix("v").split(".")[0]) < 4:
        pytest.skip(f"this kubectl renders with kustomize {version}, which knows no components")


@cache
def render(overlay: str) -> tuple[Object, ...]:
    """All objects of an overlay."""
    require_kustomize()
    text = _kubectl("kustomize", str(DEPLOY / "kubernetes" / "overlays" / overlay))
    return tuple(yaml.safe_load_all(text))


def of_kind(overlay: str, kind: str) -> dict[str, Object]:
    """By name."""
    return {item["metadata"]["name"]: item for item in render(overlay) if item["kind"] == kind}


def pod_templates(overlay: str) -> Iterator[PodTemplate]:
    for kind, path in (
        ("Deployment", ("template",)),
        ("StatefulSet", ("template",)),
        ("LeaderWorkerSet", ("leaderWorkerTemplate", "workerTemplate")),
    ):
        for name, item in of_kind(overlay, kind).items():
            template = item["spec"]
            for key in path:
                template = template[key]
            labels = template["metadata"]["labels"]
            yield PodTemplate(kind, name, labels["app.kubernetes.io/component"], template)


def environment(overlay: str, pod: PodTemplate) -> dict[str, str]:
    """What the pod's container gets; a value that only the cluster knows stands as <its name>."""
    maps = of_kind(overlay, "ConfigMap")
    values: dict[str, str] = {}
    for source in pod.container.get("envFrom", []):
        values |= maps[source["configMapRef"]["name"]]["data"]
    for variable in pod.container.get("env", []):
        values[variable["name"]] = variable.get("value", f"<{variable['name']}>")
    return values


def compose(name: str) -> Object:
    """One compose file, its variables not filled in."""
    return dict(yaml.safe_load((DEPLOY / "compose" / name).read_text()))


def env_file(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def _kubectl(*args: str) -> str:
    done = subprocess.run(["kubectl", *args], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
