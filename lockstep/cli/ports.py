"""Finds TCP ports for the processes of a stack on this machine."""

import errno
import random
import socket
from collections.abc import Iterator

from lockstep.errors import ConfigError

FIRST_PORT = 20000
LAST_PORT = 29999
"""Below the kernel's ephemeral range (32768 up by default): no outgoing connection takes one in between."""


class PortPicker:
    """Hands out free ports, each once, from a random place in the range, so that two stacks rarely meet."""

    def __init__(self, host: str = "127.0.0.1", first: int = FIRST_PORT, last: int = LAST_PORT) -> None:
        self._host = host
        self._first = first
        self._size = last - first + 1
        self._offset = random.randrange(self._size)  # a spread, not a secret
        self._left = self._size

    def take(self) -> int:
        """One free port; raises ConfigError when the range has none left."""
        return self.take_range(1)

    def take_range(self, count: int) -> int:
        """The first of `count` free ports in a row; raises ConfigError when the range has no such row."""
        row: list[int] = []
        for port in self._candidates():
            if row and port != row[-1] + 1:
                row = []
            row = [*row, port] if is_free(self._host, port) else []
            if len(row) == count:
                return row[0]
        raise ConfigError(
            f"no {count} free TCP ports in a row between {self._first} and {self._first + self._size - 1}"
        )

    def _candidates(self) -> Iterator[int]:
        while self._left > 0:
            self._left -= 1
            port = self._first + self._offset
            self._offset = (self._offset + 1) % self._size
            yield port  # last, since the reader stops here when it has enough


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    return _listen_error(host, port) is None


def require_free(host: str, port: int) -> None:
    """Raise ConfigError, with the cause and the way out, unless a server could listen there now."""
    error = _listen_error(host, port)
    if error is None:
        return
    if error.errno == errno.EADDRINUSE:
        raise ConfigError(f"port {port} is in use on {host}; stop what listens there or give another --port")
    raise ConfigError(
        f"cannot listen on {host}:{port}: {error.strerror or error}; give another --host or --port"
    )


def _listen_error(host: str, port: int) -> OSError | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        # As servers do: a port whose last connections linger in TIME_WAIT counts as free.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            sock.listen(1)
        except OSError as error:
            return error
    return None
