"""The command line: what reaches the code behind it."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.cli.main import app
from lockstep.cli.model import resolve_model

LOCKSTEP = str(Path(sys.executable).with_name("lockstep"))


@pytest.mark.parametrize(
    ("command", "module"), [("prefill", "prefill_node"), ("decode", "decode_node"), ("proxy", "proxy")]
)
def test_service_commands_pass_everything_on(
    command: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service replaces this process and gets all arguments unchanged, --help, -- and repeats included."""
    calls: list[list[str]] = []

    def execv(_path: str, argv: list[str]) -> None:
        calls.append(argv)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", execv)
    args = ["MODEL", "--max-num-seqs", "4", "--help", "-x", "--", "--version", "--seed=1", "--seed=1"]
    assert CliRunner().invoke(app, [command, *args]).exit_code == 0
    assert calls == [[sys.executable, "-P", "-m", module, *args]]


def test_sim_becomes_the_simulated_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """With pico, whose tokenizer and shape are all that is used, where no model is named."""
    calls: list[list[str]] = []

    def execv(_path: str, argv: list[str]) -> None:
        calls.append(argv)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", execv)
    for role in ("prefill", "decode"):
        for args in (["MODEL", "--port", "9"], ["--port", "9"], ["--help"]):
            assert CliRunner().invoke(app, ["sim", role, *args]).exit_code == 0
    begins = [sys.executable, "-P", "-m"]
    pico = resolve_model(None, None).path
    assert calls[:3] == [
        [*begins, "prefill_node.sim", "MODEL", "--port", "9"],
        [*begins, "prefill_node.sim", pico, "--port", "9"],
        [*begins, "prefill_node.sim", "--help"],
    ]
    assert [argv[3] for argv in calls[3:]] == ["decode_node.sim"] * 3


def test_help_lists_every_command() -> None:
    """A newcomer sees all commands and an example."""
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(
        name in result.output
        for name in ("up", "status", "prefill", "decode", "proxy", "sim", "version", "Examples")
    )


def test_version() -> None:
    """The version is the installed distribution's."""
    result = CliRunner().invoke(app, ["version"])
    assert result.output == f"lockstep {importlib.metadata.version('lockstep')}\n"


def test_wrong_model_is_one_line_and_code_2(tmp_path: Path) -> None:
    """A mistake on the command line gives one line without a traceback, before anything is started."""
    result = subprocess.run(
        [LOCKSTEP, "up", "./nowhere", "--state-dir", str(tmp_path / "s")],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr == "lockstep up: model directory ./nowhere does not exist\n"
    assert not (tmp_path / "s").exists()


def test_command_imports_no_engine() -> None:
    """The command starts in a moment: it imports neither vLLM, torch, NIXL nor a service."""
    code = (
        "import sys, lockstep.cli.main\n"
        "print([m for m in ('vllm', 'torch', 'nixl', 'grpc', 'proxy', 'prefill_node', 'decode_node')"
        " if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "[]\n"
