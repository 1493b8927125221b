"""Owns the GPU worker of a decode engine: vLLM's, with a runner that records its steps.

Not run yet: no GPU was at hand. What can be checked without one is in tests/unit/decode/test_gpu_worker.py.
"""

from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from decode_node.idle_rounds import IdleRoundsWorkerMixin
from decode_node.step_recorder import RecordingWorkerMixin, StepRecorderMixin


class LockstepGpuModelRunner(StepRecorderMixin, GPUModelRunner):
    """vLLM's V1 GPU runner that records how each step was dispatched."""


class LockstepGpuWorker(IdleRoundsWorkerMixin, RecordingWorkerMixin, Worker):
    """vLLM's GPU worker on model runner V1; the decode role names it where the platform is CUDA."""

    def _make_model_runner(self) -> Any:
        """vLLM's hook for subclasses (v1/worker/gpu_worker.py:563).

        Raises:
            ValueError: model runner V2 is on, which has no recorder; a node refuses it before.
        """
        if self.use_v2_model_runner:
            raise ValueError("Lockstep's decode worker needs model runner V1 (VLLM_USE_V2_MODEL_RUNNER=0)")
        return LockstepGpuModelRunner(self.vllm_config, self.device)

    def init_device(self) -> None:
        super().init_device()
        self.watch_idle_rounds(self.parallel_config)
