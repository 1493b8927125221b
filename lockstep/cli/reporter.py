"""The seam between the supervisor and whoever shows what it does."""

from enum import StrEnum
from typing import Protocol

from lockstep.cli.plan import StackPlan


class Phase(StrEnum):
    """Where a supervised process is."""

    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    STOPPING = "stopping"


class Reporter(Protocol):
    """Told about each change, from the event loop's thread; must not block."""

    def phase(self, role: str, phase: Phase, detail: str = "") -> None:
        """A process changed its phase, or has something new to say in it."""

    def stack_ready(self, plan: StackPlan) -> None:
        """All processes are ready for the first time."""

    def note(self, line: str) -> None:
        """One line for the user."""
