"""The platform plugin answers only when asked, and costs nothing to ask."""

import subprocess
import sys

import pytest

from decode_node.cpu_platform import plugin


def test_active_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """LOCKSTEP_CPU_PLATFORM=1 gives the class."""
    monkeypatch.setenv("LOCKSTEP_CPU_PLATFORM", "1")
    assert plugin.register() == "decode_node.cpu_platform.platform.LockstepCpuPlatform"


@pytest.mark.parametrize("value", [None, "", "0", "true"])
def test_inactive_otherwise(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    """A CUDA machine, or a plain vLLM beside us, keeps its own platform."""
    monkeypatch.delenv("LOCKSTEP_CPU_PLATFORM", raising=False)
    if value is not None:
        monkeypatch.setenv("LOCKSTEP_CPU_PLATFORM", value)
    assert plugin.register() is None


def test_asking_imports_neither_vllm_nor_torch() -> None:
    """vLLM asks while it resolves its own platform: importing it back would be a circle."""
    code = (
        "import sys, decode_node.cpu_platform.plugin as p, decode_node.step_recorder; p.register();"
        "sys.exit(any(name in sys.modules for name in ('vllm', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0
