"""What a worker is told at its start, and what it tells back: pipes and a socket that it inherits."""

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class Place:
    """One worker's, as its supervisor gives it; file descriptors are valid in the worker.

    `number` is from 1 to `of`. `answers_health`: nobody else answers yet, so this worker says on the port
    that it is alive and not ready. Otherwise it keeps off the port until it can serve: it would take
    connections from the workers that do.
    """

    number: int
    of: int
    socket_fd: int
    ready_fd: int
    lifeline_fd: int
    answers_health: bool

    @classmethod
    def parse(cls, text: str) -> "Place":
        """Raises msgspec.DecodeError."""
        return msgspec.json.decode(text, type=cls)

    def argument(self) -> str:
        """What `parse` reads."""
        return msgspec.json.encode(self).decode()

    def socket(self) -> socket.socket:
        """The port that all workers accept from; call it once."""
        return socket.socket(fileno=self.socket_fd)

    def ready(self) -> None:
        """Tell the supervisor that this worker serves; call it once."""
        os.write(self.ready_fd, b"\n")
        os.close(self.ready_fd)

    @contextmanager
    def supervised(self, orphaned: Callable[[], None]) -> Iterator[None]:
        """Call `orphaned` when the supervisor is gone, however it went."""
        loop = asyncio.get_running_loop()

        def gone() -> None:
            loop.remove_reader(self.lifeline_fd)
            orphaned()

        loop.add_reader(self.lifeline_fd, gone)
        try:
            yield
        finally:
            loop.remove_reader(self.lifeline_fd)
