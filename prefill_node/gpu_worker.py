"""Owns the GPU worker of a prefill engine: vLLM's, with a runner that hands first tokens over.

Not run yet: no GPU was at hand. What can be checked without is in tests/unit/kv_transfer/test_hand_off.py.
"""

from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from kv_transfer.handoff.runner import HandOffRunnerMixin


class PrefillGpuModelRunner(HandOffRunnerMixin, GPUModelRunner):
    """vLLM's V1 GPU runner that hands first tokens over."""


class PrefillGpuWorker(Worker):
    """vLLM's GPU worker on model runner V1; the prefill role names it where the platform is CUDA."""

    def _make_model_runner(self) -> Any:
        """vLLM's hook for subclasses (v1/worker/gpu_worker.py:563).

        Raises:
            ValueError: model runner V2 is on, which hands nothing over; a node refuses it before.
        """
        if self.use_v2_model_runner:
            raise ValueError("Lockstep's prefill worker needs model runner V1 (VLLM_USE_V2_MODEL_RUNNER=0)")
        return PrefillGpuModelRunner(self.vllm_config, self.device)
