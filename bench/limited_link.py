"""Two network namespaces joined by a link of limited speed, where the machine permits that."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class NotPermittedError(RuntimeError):
    """This machine does not let us make namespaces or shape traffic; the text says what failed."""


@dataclass(frozen=True, slots=True)
class End:
    """One end of the link: prefix a command with `command` to run it there."""

    namespace: str
    device: str
    address: str

    @property
    def command(self) -> list[str]:
        return ["ip", "netns", "exec", self.namespace]


@contextmanager
def limited_link(mbit_per_s: int) -> Iterator[tuple[End, End]]:
    """Raises NotPermittedError."""
    ends = tuple(
        End(f"lockstep-bench-{os.getpid()}-{side}", f"ls{side}{os.getpid() % 100000}", f"10.213.7.{side}")
        for side in (1, 2)
    )
    try:
        for end in ends:
            _run("ip", "netns", "add", end.namespace)
        first, second = ends
        _run(
            *("ip", "link", "add", first.device, "netns", first.namespace),
            *("type", "veth", "peer", "name", second.device, "netns", second.namespace),
        )
        for end in ends:
            _run("ip", "-n", end.namespace, "addr", "add", f"{end.address}/24", "dev", end.device)
            for device in ("lo", end.device):
                _run("ip", "-n", end.namespace, "link", "set", device, "up")
            shape = ("tbf", "rate", f"{mbit_per_s}mbit", "burst", "64kb", "latency", "100ms")
            _run(*end.command, "tc", "qdisc", "add", "dev", end.device, "root", *shape)
        yield first, second
    finally:
        for end in ends:
            subprocess.run(["ip", "netns", "del", end.namespace], capture_output=True, check=False)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except FileNotFoundError as error:
        raise NotPermittedError(f"{command[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        raise NotPermittedError(f"{' '.join(command)}: {error.stderr.strip()}") from error
