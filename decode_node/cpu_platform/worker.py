"""Owns the CPU worker of an engine: one core for its rank, a runner that records its steps."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.distributed.parallel_state import get_dp_group
from vllm.v1.worker import cpu_worker

from decode_node.cpu_platform.cores import core_for_rank, pin_thread, threads_started_unpinned
from decode_node.cpu_platform.dp_agreement import agree_over
from decode_node.cpu_platform.expert_parallel import map_experts
from decode_node.cpu_platform.lone_groups import LoneGroups
from decode_node.cpu_platform.shm_exchange import SharedMemoryExchange
from decode_node.idle_rounds import IdleRoundsWorkerMixin
from decode_node.step_recorder import RecordingWorkerMixin, StepRecorderMixin
from kv_transfer.handoff.runner import HandOffRunnerMixin

# Engine processes show only loggers under "vllm" (vllm/logger.py).
logger = logging.getLogger(f"vllm.{__name__}")


class LockstepCpuModelRunner(HandOffRunnerMixin, StepRecorderMixin, cpu_worker.CPUModelRunner):
    """vLLM's V1 CPU runner that records how each step was dispatched, and hands first tokens over."""


@contextmanager
def _runner_class(runner_class: type) -> Iterator[None]:
    """Have `CPUWorker.init_device` build `runner_class`: it looks the name up in its module."""
    original = cpu_worker.CPUModelRunner
    cpu_worker.CPUModelRunner = runner_class
    try:
        yield
    finally:
        cpu_worker.CPUModelRunner = original


class LockstepCpuWorker(IdleRoundsWorkerMixin, RecordingWorkerMixin, cpu_worker.CPUWorker):
    """vLLM's CPU worker, bound to its rank's core."""

    def init_device(self) -> None:
        """Pin first, so that every thread of the engine inherits the core, then start as vLLM does.

        Raises:
            ValueError: LOCKSTEP_CPU_CORES does not fit this machine and these ranks, or the V2 runner is on.
        """
        if self.use_v2_model_runner:
            raise ValueError("The Lockstep CPU platform needs model runner V1 (VLLM_USE_V2_MODEL_RUNNER=0)")
        self._unpinned_cores = os.sched_getaffinity(0)
        core = core_for_rank(os.environ, self._rank_on_node(), self._unpinned_cores)
        if core is not None:
            pin_thread(core)
            # vLLM's init_device forbids later changes; more threads than cores would only take turns.
            torch.set_num_threads(1)
            logger.info("Local rank %d runs on core %d.", self._rank_on_node(), core)
        map_experts()
        with _runner_class(LockstepCpuModelRunner), LoneGroups().shared():
            super().init_device()
        dp_group = get_dp_group()
        exchange = dp_group.device_communicator.moe_exchange if dp_group.world_size > 1 else None
        if isinstance(exchange, SharedMemoryExchange):
            agree_over(exchange, dp_group.world_size)
        self.watch_idle_rounds(self.parallel_config)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """The KV connector starts here: its transfer threads are left free to use any core but are not pushed
        onto the one that computes (gpu_worker.py:874)."""
        with threads_started_unpinned(self._unpinned_cores):
            super().initialize_from_config(kv_cache_config)

    def _rank_on_node(self) -> int:
        parallel = self.parallel_config
        local_dp_rank = parallel.data_parallel_rank_local or 0
        return int(local_dp_rank * parallel.world_size + self.local_rank)
