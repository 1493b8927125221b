"""Gives the sockets between vLLM's processes a folder of the node's own, which goes with the node.

vLLM makes them in the temporary folder itself (envs.py:730, utils/network_utils.py:175), and an engine core
that has to be killed leaves its own behind.
"""

import os
import shutil
import tempfile
from pathlib import Path

VARIABLE = "VLLM_RPC_BASE_PATH"
MAX_SOCKET_PATH = 107
"""Bytes of `sun_path` (unix(7)), less its end mark."""
SOCKET_NAME_LENGTH = 36
"""vLLM names them by UUID."""


def prefix(pid: int) -> str:
    """What the folder of a node begins with."""
    return f"lockstep-ipc-{pid}-"


def make() -> None:
    """Make it, before vLLM starts an engine core; not where the user set one or its path were too long."""
    if VARIABLE in os.environ:
        return
    folder = tempfile.mkdtemp(prefix=prefix(os.getpid()))
    if len(os.fsencode(folder)) + 1 + SOCKET_NAME_LENGTH > MAX_SOCKET_PATH:
        os.rmdir(folder)
        return
    os.environ[VARIABLE] = folder


def remove() -> None:
    """Remove it, once the engine cores are gone; does nothing where `make` made none."""
    folder = Path(os.environ.get(VARIABLE, ""))
    if folder.name.startswith(prefix(os.getpid())):
        shutil.rmtree(folder, ignore_errors=True)
