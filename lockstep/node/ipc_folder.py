"""Gives the sockets between vLLM's processes a folder of the node's own, which goes with the node.

vLLM makes them in the temporary folder itself (envs.py:730, utils/network_utils.py:175), and an engine core
that has to be killed leaves its own behind. A node that is killed itself leaves its folder; the next one to
start beside it removes that.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

VARIABLE = "VLLM_RPC_BASE_PATH"
MAX_SOCKET_PATH = 107
"""Bytes of `sun_path` (unix(7)), less its end mark."""
SOCKET_NAME_LENGTH = 36
"""vLLM names them by UUID."""


_PREFIX = "lockstep-ipc-"
_LOCK = ".lock"
"""Locked while a process of the node lives, whichever container and process namespace that is in."""


def prefix(pid: int) -> str:
    """What the folder of a node begins with."""
    return f"{_PREFIX}{pid}-"


def make() -> None:
    """Make it, before vLLM starts an engine core; not where the user set one or its path were too long."""
    if VARIABLE in os.environ:
        return
    _sweep()
    folder = tempfile.mkdtemp(prefix=prefix(os.getpid()))
    if len(os.fsencode(folder)) + 1 + SOCKET_NAME_LENGTH > MAX_SOCKET_PATH:
        os.rmdir(folder)
        return
    _lock(Path(folder))
    os.environ[VARIABLE] = folder


def _lock(folder: Path) -> None:
    """For as long as this process lives. Under its name the file is never seen unlocked."""
    new = folder / f"{_LOCK}-new"
    fcntl.flock(os.open(new, os.O_CREAT | os.O_RDWR, 0o600), fcntl.LOCK_EX | fcntl.LOCK_NB)
    new.rename(folder / _LOCK)


def _sweep() -> None:
    """Remove the folders of nodes that were killed; those of other users cannot be looked into."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError), lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


def remove() -> None:
    """Remove it, once the engine cores are gone; does nothing where `make` made none."""
    folder = Path(os.environ.get(VARIABLE, ""))
    if folder.name.startswith(prefix(os.getpid())):
        shutil.rmtree(folder, ignore_errors=True)
