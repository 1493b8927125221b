"""The state directory: held by one `lockstep up` at a time; the logs, and state.json for other programs."""

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.errors import ConfigError

STATE_FILE = "state.json"


@dataclass(frozen=True, slots=True)
class ProcessState:
    """`pid` is the service's own; `restarts` counts starts after the first."""

    role: str
    pid: int
    http_url: str
    grpc_address: str
    log: str
    restarts: int


@dataclass(frozen=True, slots=True)
class StackState:
    """What state.json holds, once all are ready and again after each restart."""

    pid: int
    proxy_url: str
    served_model_name: str
    processes: tuple[ProcessState, ...]
    live_url: str = ""
    """The proxy's live page, for a browser on this machine."""


class StateDirectory:
    """Owned by one running `lockstep up`; get it from `take`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    @contextmanager
    def take(cls, path: Path) -> Iterator["StateDirectory"]:
        """Make the directory and hold it; raises ConfigError when another `lockstep up` does.

        state.json is removed at both ends, so that it is there only while what it says is true.
        """
        (path / "logs").mkdir(parents=True, exist_ok=True)
        with (path / "lock").open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                lock.seek(0)
                raise ConfigError(
                    f"another lockstep up (pid {lock.read().strip() or 'unknown'}) uses {path}; "
                    "stop it or give another --state-dir"
                ) from error
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
            directory = cls(path)
            directory._remove_state()
            try:
                yield directory
            finally:
                directory._remove_state()

    def new_log(self, role: str) -> Path:
        """An empty log file for a process of this `up`."""
        log = self.path / "logs" / f"{role}.log"
        log.write_bytes(b"")
        return log

    def write(self, state: StackState) -> None:
        """Replace state.json in one step: a reader sees the old or the new one, whole."""
        with tempfile.NamedTemporaryFile("w", dir=self.path, suffix=".tmp", delete=False) as file:
            json.dump(asdict(state), file, indent=2)
        Path(file.name).replace(self.path / STATE_FILE)

    def _remove_state(self) -> None:
        (self.path / STATE_FILE).unlink(missing_ok=True)
