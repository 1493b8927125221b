"""Contracts of vLLM's private surface that the CPU platform touches: an upgrade that moves one fails here."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import ParallelConfig, SchedulerConfig
from vllm.config.compilation import CompilationConfig
from vllm.platforms.cpu import CpuPlatform
from vllm.triton_utils import dispatcher
from vllm.utils import cpu_triton_utils
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionMetadataBuilder
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker import cpu_worker, dp_utils, gpu_worker, worker_base
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def source(thing: Any) -> str:
    return inspect.getsource(thing)


def test_platform_hooks() -> None:
    """The hooks that we override exist as class methods, and its config hook empties what we restore."""
    for name in (
        "check_and_update_config",
        "support_static_graph_mode",
        "get_attn_backend_cls",
        "get_device_communicator_cls",
    ):
        assert inspect.ismethod(getattr(CpuPlatform, name)), name
    assert parameters(CpuPlatform.check_and_update_config) == ["vllm_config"]
    assert parameters(CpuPlatform.get_attn_backend_cls)[:2] == ["selected_backend", "attn_selector_config"]
    hook = source(CpuPlatform.check_and_update_config)
    assert "scheduler_config.async_scheduling = False" in hook
    assert "compilation_config.cudagraph_capture_sizes = []" in hook
    assert 'parallel_config.distributed_executor_backend = "mp"' in hook


def test_config_fields() -> None:
    """The fields that the hook reads and writes."""
    assert "async_scheduling" in SchedulerConfig.__dataclass_fields__
    for name in ("cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size"):
        assert name in CompilationConfig.__dataclass_fields__, name
    for name in ("worker_cls", "distributed_executor_backend", "world_size", "data_parallel_rank_local"):
        assert name in ParallelConfig.__dataclass_fields__, name


def test_general_plugins_load_before_the_kernels_are_registered() -> None:
    """The order in `init_worker` that the sampling fix counts on."""
    init = source(worker_base.WorkerWrapperBase.init_worker)
    assert init.index("load_general_plugins()") < init.index("register_triton_kernel_overrides()")


def test_expand_kernel() -> None:
    """Name, parameters and place of the kernel that we replace."""
    expected = ["output", "input_val", "cu_num_tokens", "replace_from", "replace_to", "MAX_NUM_TOKENS"]
    from decode_node.cpu_platform.sampling_fix import expand_kernel

    assert parameters(expand_kernel) == expected
    assert parameters(cpu_triton_utils._expand_kernel_impl) == expected
    assert hasattr(rejection_sampler, "expand_kernel")
    assert "cpu_tl._expand_kernel_impl" in source(CpuPlatform.register_triton_kernel_overrides)


def test_rejection_random_sample_kernel() -> None:
    """The leading parameters that our wrapper names."""
    assert hasattr(rejection_sampler, "rejection_random_sample_kernel")
    text = source(CpuPlatform.register_triton_kernel_overrides)
    assert "cpu_tl._rejection_random_sample_kernel_impl" in text
    assert parameters(cpu_triton_utils._rejection_random_sample_kernel_impl)[:8] == [
        "output_token_ids",
        "cu_num_draft_tokens",
        "draft_token_ids",
        "draft_probs",
        "target_probs",
        "bonus_token_ids",
        "recovered_token_ids",
        "uniform_probs",
    ]


def test_top_k_of_no_rows() -> None:
    """The function that cannot take zero rows is looked up in its module, where ours goes."""
    assert parameters(topk_topp_sampler.apply_top_k_only) == ["logits", "k"]
    assert "return apply_top_k_only(logits, k)" in source(topk_topp_sampler.apply_top_k_top_p_pytorch)


def test_kernel_registry() -> None:
    """`_registry` maps a kernel's name to (original, implementation)."""
    assert isinstance(dispatcher._registry, dict)
    assert parameters(dispatcher.register_kernels) == ["overrides"]
    assert "_registry[name] = (original, impl)" in source(dispatcher.register_kernels)


def test_attention_builder_support() -> None:
    """Support is a class attribute read by `get_cudagraph_support`; stock CPU says NEVER."""
    assert CPUAttentionMetadataBuilder._cudagraph_support is AttentionCGSupport.NEVER
    assert "cls._cudagraph_support" in source(CPUAttentionMetadataBuilder.get_cudagraph_support)
    assert CPUAttentionBackend.get_name() == "CPU_ATTN"
    assert CPUAttentionBackend.get_builder_cls() is CPUAttentionMetadataBuilder


def test_worker_builds_the_runner_by_its_module_name() -> None:
    """`init_device` looks `CPUModelRunner` up in its module, where we put ours."""
    assert hasattr(cpu_worker, "CPUModelRunner")
    assert "self.model_runner = CPUModelRunner(self.vllm_config" in source(cpu_worker.CPUWorker.init_device)
    assert parameters(cpu_worker.CPUWorker.init_device) == ["self"]


def test_worker_methods() -> None:
    """The connector starts in `initialize_from_config`; the idle step is a dummy run that fixes its shape."""
    start = source(gpu_worker.Worker.initialize_from_config)
    assert "ensure_kv_transfer_initialized" in start
    assert parameters(gpu_worker.Worker.initialize_from_config) == ["self", "kv_cache_config"]
    assert "uniform_decode=True" in source(gpu_worker.Worker.execute_dummy_batch)


def test_runner_decides_the_mode_in_one_place() -> None:
    """Parameters of the hooked method; only dummy runs pass `force_uniform_decode`."""
    assert parameters(GPUModelRunner._determine_batch_execution_and_padding)[1:5] == [
        "num_tokens",
        "num_reqs",
        "num_scheduled_tokens_np",
        "max_num_scheduled_tokens",
    ]
    assert "force_uniform_decode=uniform_decode" in source(GPUModelRunner._dummy_run)
    assert "force_uniform_decode" not in source(GPUModelRunner.execute_model)


def test_dispatcher() -> None:
    """Asked with a shape alone, it answers without side effects; it knows its graph mode."""
    assert parameters(CudagraphDispatcher.dispatch)[1:3] == ["num_tokens", "uniform_decode"]
    assert "self." not in "".join(
        line
        for line in source(CudagraphDispatcher.dispatch).splitlines()
        if " = " in line and "self." in line.split("=")[0]
    )
    assert "self.cudagraph_mode = cudagraph_mode" in source(CudagraphDispatcher.initialize_cudagraph_keys)


def test_dp_agreement() -> None:
    """`_run_ar` returns a [4, ranks] table in the order tokens, padded tokens, microbatches, mode."""
    assert parameters(dp_utils._run_ar) == [
        "should_ubatch",
        "orig_num_tokens_per_ubatch",
        "padded_num_tokens_per_ubatch",
        "cudagraph_mode",
        "parallel_config",
    ]
    text = source(dp_utils._run_ar)
    assert "torch.zeros(4, dp_size" in text
    order = ["[0][dp_rank] = orig", "[1][dp_rank] = padded", "[2][dp_rank] = 1", "[3][dp_rank] = cudagraph"]
    positions = [text.index(entry) for entry in order]
    assert positions == sorted(positions)
    assert "_run_ar(" in source(dp_utils._synchronize_dp_ranks)


def test_moe_exchange() -> None:
    """Who calls the exchange, and with what: a list of tensors gathered at once, rows only."""
    from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    assert parameters(CpuCommunicator.__init__)[1:] == [
        "cpu_group",
        "device",
        "device_group",
        "unique_name",
        "use_all2all",
    ]
    assert parameters(CpuCommunicator.all_gatherv) == ["self", "input_", "dim", "sizes"]
    assert parameters(CpuCommunicator.reduce_scatterv) == ["self", "input_", "dim", "sizes"]
    assert "dist_group.all_gatherv(\n            tensors_to_gather,\n            dim=0" in source(
        AgRsAll2AllManager
    )
    assert "dist_group.reduce_scatterv(hidden_states, dim=0" in source(AgRsAll2AllManager.combine)


def test_cpu_experts() -> None:
    """The experts still ignore `expert_map`: once vLLM maps ids itself, ours must go."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    assert parameters(CPUUnquantizedExperts.apply)[1:10] == [
        "output",
        "hidden_states",
        "w1",
        "w2",
        "topk_weights",
        "topk_ids",
        "activation",
        "global_num_experts",
        "expert_map",
    ]
    assert parameters(CPUUnquantizedExperts.apply)[-1] == "apply_router_weight_on_input"
    assert source(CPUUnquantizedExperts.apply).count("expert_map") == 1


def test_gloo_takes_what_the_exchange_sends() -> None:
    """torch offers the two collectives that the exchange uses across hosts."""
    assert callable(torch.distributed.all_gather_into_tensor)
    assert callable(torch.distributed.all_to_all_single)
