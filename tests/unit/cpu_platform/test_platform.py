"""What the platform's config hook keeps, and what it sets, on vLLM's own config objects."""

from types import SimpleNamespace

import pytest
import torch
from vllm.config import CompilationConfig, CUDAGraphMode, SchedulerConfig
from vllm.config.compilation import CompilationMode

from decode_node.cpu_platform.platform import ATTENTION_BACKEND, WORKER, LockstepCpuPlatform


def config(
    async_scheduling: bool = True,
    mode: CUDAGraphMode = CUDAGraphMode.FULL_DECODE_ONLY,
    sizes: list[int] | None = None,
    world_size: int = 1,
    backend: str = "mp",
) -> SimpleNamespace:
    """A VllmConfig as far as the hook reads it, in the state `__post_init__` hands it over in."""
    sizes = [3, 6, 12] if sizes is None else sizes
    return SimpleNamespace(
        model_config=None,
        kv_transfer_config=None,
        lora_config=None,
        cache_config=SimpleNamespace(
            user_specified_block_size=False,
            block_size=16,
            mamba_ssm_cache_dtype="auto",
            kv_cache_memory_bytes=None,
        ),
        scheduler_config=SchedulerConfig(
            max_model_len=512, is_encoder_decoder=False, async_scheduling=async_scheduling
        ),
        parallel_config=SimpleNamespace(
            world_size=world_size,
            tensor_parallel_size=world_size,
            distributed_executor_backend=backend,
            worker_cls="auto",
            enable_dbo=False,
        ),
        compilation_config=CompilationConfig(
            mode=CompilationMode.NONE,
            cudagraph_mode=mode,
            cudagraph_capture_sizes=sizes,
            max_cudagraph_capture_size=max(sizes, default=0),
        ),
        profiler_config=SimpleNamespace(torch_profiler_dump_cuda_time_total=True),
        device_config=SimpleNamespace(device_type="cpu"),
    )


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook writes environment variables; put them back afterwards."""
    for name in (
        "VLLM_WORKER_MULTIPROC_METHOD",
        "NUMEXPR_MAX_THREADS",
        "TORCHINDUCTOR_COMPILE_THREADS",
        "VLLM_DISABLE_SHARED_EXPERTS_STREAM",
        "TORCHINDUCTOR_CPP_DYNAMIC_THREADS",
        "VLLM_SSM_CONV_STATE_LAYOUT",
        "LD_PRELOAD",
        "LOCAL_WORLD_SIZE",
    ):
        monkeypatch.setenv(name, "0")


def kept(vllm_config: SimpleNamespace) -> tuple[object, ...]:
    compilation, parallel = vllm_config.compilation_config, vllm_config.parallel_config
    return (
        vllm_config.scheduler_config.async_scheduling,
        compilation.mode,
        compilation.cudagraph_mode,
        compilation.cudagraph_capture_sizes,
        compilation.max_cudagraph_capture_size,
        parallel.distributed_executor_backend,
        parallel.worker_cls,
    )


def test_the_decode_nodes_flags_survive_however_often_the_hook_runs() -> None:
    """Once in the node and once in each engine core: async, FULL_DECODE_ONLY, its sizes, one process."""
    vllm_config = config()
    expected = (True, CompilationMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY, [3, 6, 12], 12, "uni", WORKER)
    for _ in range(3):
        LockstepCpuPlatform.check_and_update_config(vllm_config)
        assert kept(vllm_config) == expected


def test_no_async_scheduling_is_respected() -> None:
    """--no-async-scheduling reaches the hook as False and stays so."""
    vllm_config = config(async_scheduling=False)
    LockstepCpuPlatform.check_and_update_config(vllm_config)
    assert vllm_config.scheduler_config.async_scheduling is False


def test_the_prefill_nodes_flags_survive() -> None:
    """No graphs, no sizes."""
    vllm_config = config(mode=CUDAGraphMode.NONE, sizes=[])
    LockstepCpuPlatform.check_and_update_config(vllm_config)
    assert kept(vllm_config)[2:5] == (CUDAGraphMode.NONE, [], 0)


def test_tensor_parallel_ranks_keep_their_processes() -> None:
    """With two workers in an engine the multiprocess executor stays."""
    vllm_config = config(world_size=2)
    LockstepCpuPlatform.check_and_update_config(vllm_config)
    assert vllm_config.parallel_config.distributed_executor_backend == "mp"


def test_a_worker_class_of_the_users_own_is_kept() -> None:
    """Only "auto" becomes ours."""
    vllm_config = config()
    vllm_config.parallel_config.worker_cls = "somewhere.Worker"
    LockstepCpuPlatform.check_and_update_config(vllm_config)
    assert vllm_config.parallel_config.worker_cls == "somewhere.Worker"


def test_cpu_attention_is_replaced_and_declares_uniform_batches() -> None:
    """The backend keeps the name that is in NIXL's compatibility hash; its builder supports FULL decode."""
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backend import AttentionCGSupport

    selector = SimpleNamespace(use_sparse=False, use_mla=False, dtype=torch.float32)
    path = LockstepCpuPlatform.get_attn_backend_cls(None, selector, num_heads=4)
    assert path == ATTENTION_BACKEND
    backend = resolve_obj_by_qualname(path)
    assert backend.get_name() == "CPU_ATTN"
    support = backend.get_builder_cls().get_cudagraph_support(None, None)
    assert support is AttentionCGSupport.UNIFORM_BATCH
