"""Owns the process groups of a single rank: one gloo group serves all of them.

vLLM opens two groups for each of its dimensions (parallel_state.py, `GroupCoordinator`), and each gloo group
has a thread that wakes a hundred times a second, idle or not. Most groups of an engine have one rank, itself:
they never send anything, so they can be one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


class LoneGroups:
    """The shared groups of this process, by rank and backend."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, str | None], dist.ProcessGroup] = {}
        self._destroyed: set[dist.ProcessGroup] = set()
        self._new_group = dist.new_group
        self._destroy_process_group = dist.destroy_process_group

    @contextmanager
    def shared(self) -> Iterator[None]:
        """While open, `torch.distributed.new_group` gives lone ranks their shared group.

        All ranks of a job must be inside together, since new_group is a collective. Afterwards the groups may
        each be destroyed as often as they were handed out.
        """
        dist.new_group = self._shared_or_new
        dist.destroy_process_group = self._destroy
        try:
            yield
        finally:
            dist.new_group = self._new_group

    def _shared_or_new(
        self,
        ranks: Sequence[int] | None = None,
        timeout: Any = None,
        backend: str | None = None,
        **named: Any,
    ) -> dist.ProcessGroup:
        if ranks is None or len(ranks) != 1:
            return self._new_group(ranks, timeout, backend, **named)
        key = (ranks[0], backend)
        if key not in self._groups:
            self._groups[key] = self._new_group(ranks, timeout, backend, **named)
        return self._groups[key]

    def _destroy(self, group: dist.ProcessGroup | None = None) -> None:
        if group in self._destroyed:
            return
        if group is not None and group in self._groups.values():
            self._destroyed.add(group)
        self._destroy_process_group(group)
