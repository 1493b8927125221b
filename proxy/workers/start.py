"""The way from a checked command line to the supervisor: this process becomes it, and forgets vLLM."""

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

import msgspec

_STOP_MARGIN_S = 20.0
"""What workers get on top of the drain, for closing connections and sessions."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What the supervisor needs of the configuration; the rest is the workers' to read."""

    socket_fd: int
    num_workers: int
    patience_s: float
    log_format: Literal["console", "json"]
    log_level: str

    @classmethod
    def parse(cls, text: str) -> "Orders":
        """Raises msgspec.DecodeError."""
        return msgspec.json.decode(text, type=cls)


def become_supervisor(
    sock: socket.socket,
    num_workers: int,
    drain_timeout_s: float,
    log: tuple[Literal["console", "json"], str],
    argv: Sequence[str],
    environment: Mapping[str, str],
) -> NoReturn:
    """Replace this process by the supervisor, which inherits the bound socket.

    `argv` and `environment` are those that this process was started with: the workers read them anew.
    """
    os.set_inheritable(sock.fileno(), True)
    orders = Orders(sock.fileno(), num_workers, drain_timeout_s + _STOP_MARGIN_S, *log)
    text = msgspec.json.encode(orders).decode()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, "-P", "-m", "proxy.workers", text, *argv], dict(environment))
