"""The GPU worker as far as it can be checked without a GPU: what vLLM would build and call."""

import inspect
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from decode_node.gpu_worker import LockstepGpuModelRunner, LockstepGpuWorker
from decode_node.service import GPU_WORKER
from decode_node.step_recorder import StepRecorderMixin
from kv_transfer.worker_rpc import KVWorkerExtension


def test_name_is_resolved_as_vllm_does() -> None:
    """`worker_cls` is a string (v1/worker/worker_base.py:285)."""
    assert resolve_obj_by_qualname(GPU_WORKER) is LockstepGpuWorker


def test_recorder_comes_before_vllms_runner() -> None:
    """Its override wraps the one place where a step's mode is decided."""
    mro = LockstepGpuModelRunner.__mro__
    assert mro.index(StepRecorderMixin) < mro.index(GPUModelRunner)
    decide = "_determine_batch_execution_and_padding"
    assert getattr(LockstepGpuModelRunner, decide) is getattr(StepRecorderMixin, decide)


def test_hooks_are_vllms() -> None:
    """The worker builds its runner in a method for subclasses, and steps idly in another."""
    assert "self._make_model_runner()" in inspect.getsource(Worker._init_workspace_and_model_runner)
    assert list(inspect.signature(GPUModelRunner.__init__).parameters)[1:3] == ["vllm_config", "device"]
    dummy = inspect.getsource(Worker.execute_dummy_batch)
    assert "uniform_decode=True" in dummy
    assert "uniform_decode_query_len" in dummy


def test_rpc_names_do_not_clash_with_the_connectors() -> None:
    """vLLM asserts it when it adds the extension (worker_base.py:303)."""
    added = {name for name in dir(KVWorkerExtension) if not name.startswith("__")}
    assert not [name for name in added if hasattr(LockstepGpuWorker, name)]


def worker(**attributes: Any) -> LockstepGpuWorker:
    made = LockstepGpuWorker.__new__(LockstepGpuWorker)
    vars(made).update(attributes)
    return made


def test_runner_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made of the worker's configuration and device; vLLM's constructor is not run here, it allocates."""
    given: list[object] = []
    monkeypatch.setattr(GPUModelRunner, "__init__", lambda self, *args: given.extend(args))
    runner = worker(use_v2_model_runner=False, vllm_config="c", device="d")._make_model_runner()
    assert type(runner) is LockstepGpuModelRunner
    assert given == ["c", "d"]


def test_runner_v2_is_refused() -> None:
    """It decides elsewhere, so nothing would be recorded."""
    with pytest.raises(ValueError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        worker(use_v2_model_runner=True)._make_model_runner()


def test_dummy_batch_is_an_idle_step() -> None:
    """vLLM's dummy run happens inside `idle_step`, and records are taken from the runner."""
    calls: list[str] = []

    @contextmanager
    def idle_step() -> Any:
        calls.append("in")
        yield
        calls.append("out")

    runner = SimpleNamespace(
        idle_step=idle_step,
        uniform_decode_query_len=3,
        _dummy_run=lambda num_tokens, **how: calls.append(f"run {num_tokens} {how['uniform_decode']}"),
        step_ring=SimpleNamespace(take=lambda: {"records": [], "dropped": 0}),
    )
    parallel = SimpleNamespace(data_parallel_size=2)
    made = worker(model_runner=runner, parallel_config=parallel)
    made.execute_dummy_batch()
    assert calls == ["in", "run 3 True", "out"]
    assert made.lockstep_take_step_records() == {"records": [], "dropped": 0}
