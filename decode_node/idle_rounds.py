"""Owns how a rank learns that no rank of its group had work in a round: from the agreement on its graph mode.

vLLM's ranks agree on a table of numbers in each forward pass (v1/worker/dp_utils.py, `_run_ar`), so this
costs no message of its own: an idle rank adds a bit to its graph mode, which is taken out again here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.worker import dp_utils

IDLE = 1 << 8
"""Graph modes are 0 to 2 (vllm/config/compilation.py, `CUDAGraphMode`)."""


class IdleRounds:
    """One process's; the engine's thread alone uses it."""

    def __init__(self) -> None:
        self._idle = False
        self.all_idle = False
        """No rank had work in the round of the last agreement."""

    @contextmanager
    def idle(self) -> Iterator[None]:
        """This rank has no work in the round inside."""
        self._idle, self.all_idle = True, False
        try:
            yield
        finally:
            self._idle = False

    def watch(self) -> None:
        """Wrap whatever agrees in this process now. All ranks of a group have to, or none."""
        agree = dp_utils._run_ar

        def agree_and_note(
            should_ubatch: bool,
            orig_num_tokens_per_ubatch: int,
            padded_num_tokens_per_ubatch: int,
            cudagraph_mode: int,
            parallel_config: Any,
        ) -> Any:
            table = agree(
                should_ubatch=should_ubatch,
                orig_num_tokens_per_ubatch=orig_num_tokens_per_ubatch,
                padded_num_tokens_per_ubatch=padded_num_tokens_per_ubatch,
                cudagraph_mode=cudagraph_mode + IDLE * self._idle,
                parallel_config=parallel_config,
            )
            self.all_idle = bool((table[3] >= IDLE).all())
            table[3] %= IDLE
            return table

        dp_utils._run_ar = agree_and_note


class IdleRoundsWorkerMixin:
    """Put before a V1 worker. Without `watch_idle_rounds` no round counts as idle."""

    _idle_rounds: IdleRounds | None = None

    def watch_idle_rounds(self, parallel_config: Any) -> None:
        """Once the worker has its groups. A table on a device is left alone: to read it is to wait for it."""
        if parallel_config.data_parallel_size > 1 and parallel_config.disable_nccl_for_dp_synchronization:
            self._idle_rounds = IdleRounds()
            self._idle_rounds.watch()

    def execute_dummy_batch(self) -> bool:
        """As vLLM's; returns whether no rank of the group had work."""
        if self._idle_rounds is None:
            super().execute_dummy_batch()  # type: ignore[misc]
            return False
        with self._idle_rounds.idle():
            super().execute_dummy_batch()  # type: ignore[misc]
        return self._idle_rounds.all_idle
