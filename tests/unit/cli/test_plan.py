"""The plan of `lockstep up`: what each process is started with."""

import json
import sys
from dataclasses import replace

import pytest

from lockstep.cli.machine import Device, Machine
from lockstep.cli.model import Model
from lockstep.cli.plan import ProcessSpec, StackPlan, StackPorts, UpOptions, plan_stack

MODEL = Model(path="/models/pico", served_name="pico", local=True)
OPTIONS = UpOptions(host="127.0.0.1", port=8000, decode_ranks=2, num_speculative_tokens=2, dtype=None)
PORTS = StackPorts(
    prefill_grpc=20001,
    prefill_http=20002,
    prefill_side_channel=20003,
    decode_grpc=20004,
    decode_http=20005,
    decode_side_channel=20006,
    proxy_admin=20008,
)
CPU = Machine(device=Device.CPU, cores=(0, 1))
CUDA = Machine(device=Device.CUDA, cores=(0, 1))


def plan(
    options: UpOptions = OPTIONS,
    machine: Machine = CPU,
    environ: dict[str, str] | None = None,
    model: Model = MODEL,
) -> StackPlan:
    return plan_stack(model, options, PORTS, machine, environ or {"PATH": "/bin"})


def process(stack: StackPlan, role: str) -> ProcessSpec:
    return next(spec for spec in stack.processes if spec.role == role)


def test_prefill_command_line() -> None:
    """The prefill node gets the model, its three ports on the loopback address and the engine flags."""
    spec = process(plan(), "prefill")
    assert spec.argv == (
        *(sys.executable, "-P", "-m", "prefill_node", "/models/pico"),
        *("--host", "127.0.0.1", "--port", "20001", "--http-port", "20002"),
        *("--side-channel-host", "127.0.0.1", "--side-channel-port", "20003"),
        *("--dtype", "float32"),
        *("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}'),
        *("--kv-cache-memory-bytes", "536870912"),
    )


def test_decode_command_line() -> None:
    """The decode node gets one data-parallel rank for each asked for, and the engine flags of prefill."""
    spec = process(plan(), "decode")
    assert spec.argv == (
        *(sys.executable, "-P", "-m", "decode_node", "/models/pico"),
        *("--host", "127.0.0.1", "--port", "20004", "--http-port", "20005"),
        *("--side-channel-host", "127.0.0.1", "--side-channel-port", "20006"),
        *("--data-parallel-size", "2"),
        *("--dtype", "float32"),
        *("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}'),
        *("--kv-cache-memory-bytes", "536870912"),
    )


def test_proxy_command_line() -> None:
    """The proxy gets both nodes' gRPC addresses, the public address and the name to serve under."""
    spec = process(plan(), "proxy")
    assert spec.argv == (
        *(sys.executable, "-P", "-m", "proxy"),
        *("--prefill", "127.0.0.1:20001", "--decode", "127.0.0.1:20004"),
        *("--host", "127.0.0.1", "--port", "8000", "--served-model-name", "pico"),
        *("--admin-port", "20008"),
    )
    assert plan().live_url == "http://127.0.0.1:20008/lockstep/"


@pytest.mark.parametrize("given", [("--admin-port", "9000"), ("--admin-port=9000",)])
def test_admin_port_of_ones_own(given: tuple[str, ...]) -> None:
    """The proxy gets it once, and no other place is told as the live page's."""
    stack = plan(replace(OPTIONS, proxy_args=given))
    assert sum(arg.startswith("--admin-port") for arg in process(stack, "proxy").argv) == 1
    assert stack.live_url == ""


def test_addresses_to_watch() -> None:
    """Readiness is asked on each node's HTTP port and on the proxy's public port."""
    stack = plan()
    assert [(spec.role, spec.http_url, spec.grpc_address) for spec in stack.processes] == [
        ("proxy", "http://127.0.0.1:8000", ""),
        ("prefill", "http://127.0.0.1:20002", "127.0.0.1:20001"),
        ("decode", "http://127.0.0.1:20005", "127.0.0.1:20004"),
    ]


def test_proxy_is_stopped_before_the_nodes() -> None:
    """Its streams can only drain while the nodes still serve."""
    stack = plan()
    assert process(stack, "proxy").stop_wave < process(stack, "prefill").stop_wave
    assert process(stack, "prefill").stop_wave == process(stack, "decode").stop_wave


def test_no_speculation_asked_for() -> None:
    """With 0 speculative tokens no speculative config is passed, so a model without MTP can be served."""
    stack = plan(replace(OPTIONS, num_speculative_tokens=0))
    assert "--speculative-config" not in process(stack, "prefill").argv
    assert "--speculative-config" not in process(stack, "decode").argv


def test_number_of_speculative_tokens_reaches_both_nodes() -> None:
    """Both nodes must speculate with the same K, or the proxy does not pair them."""
    stack = plan(replace(OPTIONS, num_speculative_tokens=3))
    for role in ("prefill", "decode"):
        argv = process(stack, role).argv
        config = json.loads(argv[argv.index("--speculative-config") + 1])
        assert config == {"method": "mtp", "num_speculative_tokens": 3}


def test_extra_arguments_go_to_their_process_only() -> None:
    """Pass-through arguments come last, so that they win, and only where they were sent."""
    stack = plan(
        replace(
            OPTIONS,
            prefill_args=("--max-num-seqs=3",),
            decode_args=("--seed=4",),
            proxy_args=("--root-path=/a",),
        )
    )
    assert process(stack, "prefill").argv[-1] == "--max-num-seqs=3"
    assert process(stack, "decode").argv[-1] == "--seed=4"
    assert process(stack, "proxy").argv[-1] == "--root-path=/a"
    assert "--seed=4" not in process(stack, "prefill").argv


def test_cpu_environment_of_nodes() -> None:
    """Without an accelerator nodes run our CPU platform on one thread an engine, runner V1, offline."""
    env = process(plan(), "prefill").env
    assert {name: env[name] for name in env if name != "PYTHONUNBUFFERED"} == {
        "PATH": "/bin",
        "LOCKSTEP_CPU_PLATFORM": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def test_each_decode_rank_gets_a_core() -> None:
    """The decode node is told one core a rank, from those this process may use; the prefill node none."""
    stack = plan(machine=Machine(device=Device.CPU, cores=(3, 5, 6)))
    assert process(stack, "decode").env["LOCKSTEP_CPU_CORES"] == "3,5"
    assert "LOCKSTEP_CPU_CORES" not in process(stack, "prefill").env


def test_more_ranks_than_cores() -> None:
    """Ranks are not pinned when there are not enough cores to give each its own."""
    stack = plan(machine=Machine(device=Device.CPU, cores=(0,)))
    assert "LOCKSTEP_CPU_CORES" not in process(stack, "decode").env


def test_what_the_user_set_wins() -> None:
    """Cache size, runner and cores from the environment are kept."""
    mine = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_USE_V2_MODEL_RUNNER": "1", "LOCKSTEP_CPU_CORES": "7,8"}
    spec = process(plan(environ=mine), "decode")
    assert {name: spec.env[name] for name in mine} == mine
    assert "--kv-cache-memory-bytes" not in spec.argv


def test_cuda_leaves_dtype_and_threads_to_vllm() -> None:
    """On CUDA nothing of the CPU set-up is passed."""
    spec = process(plan(machine=CUDA), "decode")
    assert not {"--dtype", "--kv-cache-memory-bytes"} & set(spec.argv)
    assert not {"LOCKSTEP_CPU_PLATFORM", "LOCKSTEP_CPU_CORES", "OMP_NUM_THREADS"} & set(spec.env)


@pytest.mark.parametrize("machine", [CPU, CUDA])
def test_given_dtype_is_passed(machine: Machine) -> None:
    """--dtype reaches the nodes on every device."""
    argv = process(plan(replace(OPTIONS, dtype="bfloat16"), machine), "prefill").argv
    assert argv[argv.index("--dtype") + 1] == "bfloat16"


def test_hub_model_may_go_online() -> None:
    """Only a local model switches the hub off."""
    hub = Model(path="org/model", served_name="org/model", local=False)
    assert "HF_HUB_OFFLINE" not in process(plan(model=hub), "prefill").env


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("10.0.0.5", "http://10.0.0.5:8000"),
    ],
)
def test_url_to_connect_to(host: str, url: str) -> None:
    """An address that means all interfaces is listened on, but not connected to."""
    assert plan(replace(OPTIONS, host=host)).proxy_url == url


def test_gpus_are_shared_out() -> None:
    """Each node sees its own GPUs and is tensor parallel over those of one rank."""
    options = replace(OPTIONS, prefill_devices=("0",), decode_devices=("1", "2", "3", "4"))
    stack = plan(options, machine=CUDA)
    prefill, decode = process(stack, "prefill"), process(stack, "decode")
    assert prefill.env["CUDA_VISIBLE_DEVICES"] == "0"
    assert "--tensor-parallel-size" not in prefill.argv
    assert decode.env["CUDA_VISIBLE_DEVICES"] == "1,2,3,4"
    assert decode.argv[decode.argv.index("--tensor-parallel-size") + 1] == "2"
    assert "--gpu-memory-utilization" not in (*prefill.argv, *decode.argv)


def test_nodes_on_one_gpu_share_its_memory() -> None:
    """vLLM's own share for each, 0.92, would leave the second node none."""
    options = replace(OPTIONS, decode_ranks=1, prefill_devices=("0",), decode_devices=("0",))
    for role in ("prefill", "decode"):
        argv = process(plan(options, machine=CUDA), role).argv
        assert argv[argv.index("--gpu-memory-utilization") + 1] == "0.45"
