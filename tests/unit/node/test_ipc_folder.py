"""Where the sockets of vLLM's processes lie, and that they go with the node."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.utils.network_utils import get_open_zmq_ipc_path

from lockstep.node import ipc_folder


@pytest.fixture(autouse=True)
def temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stands for the machine's; its own path is short, as that one is."""
    # setenv first, so that what the code itself sets is undone as well.
    monkeypatch.setenv(ipc_folder.VARIABLE, "")
    monkeypatch.delenv(ipc_folder.VARIABLE)
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_vllms_sockets_go_with_the_node(temporary_folder: Path) -> None:
    """What a killed engine core left there too, and nothing else of the temporary folder."""
    (temporary_folder / "somebody-elses").touch()
    ipc_folder.make()
    socket = Path(get_open_zmq_ipc_path().removeprefix("ipc://"))
    assert socket.parent.parent == temporary_folder
    assert len(str(socket)) <= ipc_folder.MAX_SOCKET_PATH
    assert len(socket.name) == ipc_folder.SOCKET_NAME_LENGTH
    socket.touch()
    ipc_folder.remove()
    assert [path.name for path in temporary_folder.iterdir()] == ["somebody-elses"]


def test_what_a_killed_node_left_goes_when_the_next_one_starts(
    temporary_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folders of two nodes that live stay, and one that is being made."""
    script = "from lockstep.node import ipc_folder; ipc_folder.make(); print(1, flush=True); input()"
    command = [sys.executable, "-P", "-c", script]
    environment = {**os.environ, "TMPDIR": str(temporary_folder)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as node:
        assert node.stdout is not None
        assert node.stdout.readline() == b"1\n"
        (left,) = temporary_folder.iterdir()
        (temporary_folder / f"{ipc_folder.prefix(1)}new").mkdir()
        ipc_folder.make()
        assert len(list(temporary_folder.iterdir())) == 3
        node.kill()
    monkeypatch.delenv(ipc_folder.VARIABLE)
    ipc_folder.make()
    assert not left.exists()
    assert len(list(temporary_folder.iterdir())) == 3


def test_a_folder_that_the_user_set_stays(temporary_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So does one of another node."""
    theirs = temporary_folder / f"{ipc_folder.prefix(os.getpid() + 1)}x"
    theirs.mkdir()
    monkeypatch.setenv(ipc_folder.VARIABLE, str(theirs))
    ipc_folder.make()
    assert os.environ[ipc_folder.VARIABLE] == str(theirs)
    ipc_folder.remove()
    assert theirs.exists()


def test_no_folder_whose_sockets_had_too_long_a_path(
    temporary_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the temporary folder itself would still do, vLLM goes on using that."""
    longest = temporary_folder / ("x" * (69 - len(str(temporary_folder))))
    longest.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(longest))
    ipc_folder.make()
    assert ipc_folder.VARIABLE not in os.environ
    assert list(longest.iterdir()) == []
    ipc_folder.remove()
