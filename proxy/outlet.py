"""The way from the flow back to one front end: its outputs and its errors."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from vllm.v1.engine import EngineCoreOutputs

from lockstep.errors import LockstepError
from proxy.served import Served

FailRequest = Callable[[str, LockstepError], Iterable[str]]
"""Delivers an error to the client's request; returns the internal ids of all its choices."""


def _nobody(front_id: str, error: LockstepError) -> Iterable[str]:
    return ()


@dataclass(slots=True, eq=False)
class Outlet:
    """One for each front end. There are two while the requests of one that was succeeded run on."""

    served: Served | None = None
    """What the front end was built for, which bounds the choice of nodes; None: whatever is served now."""
    outputs: "asyncio.Queue[EngineCoreOutputs]" = field(default_factory=asyncio.Queue)
    """In the front end's own ids and clock."""
    fail_request: FailRequest = _nobody
