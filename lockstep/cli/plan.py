"""Turns the options of `lockstep up` into processes to start, with arguments and environment; pure."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from lockstep.cli.machine import Device, Machine
from lockstep.cli.model import Model

NODE_HOST = "127.0.0.1"
"""Where the nodes of a one-machine stack listen; only the proxy is reachable from outside."""

NODE_STOP_S = 45.0
PROXY_STOP_S = 40.0
"""Time to exit after SIGTERM before SIGKILL: the services' own drain deadline of 30 s and their teardown."""


SHARED_GPU_MEMORY = 0.45
"""Share of a GPU's memory for each of two nodes on it."""

CPU_KV_CACHE_BYTES = 512 * 1024 * 1024
"""For each engine; 100,000 tokens of pico."""


class Role(StrEnum):
    """Also the name of the process in messages and of its log file."""

    PROXY = "proxy"
    PREFILL = "prefill"
    DECODE = "decode"


MODULES = {Role.PROXY: "proxy", Role.PREFILL: "prefill_node", Role.DECODE: "decode_node"}


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The options of `lockstep up` that shape the processes."""

    host: str
    port: int
    decode_ranks: int
    num_speculative_tokens: int
    dtype: str | None
    prefill_devices: tuple[str, ...] = ()
    """GPUs of the prefill node, which is tensor parallel over them; none on a CPU."""
    decode_devices: tuple[str, ...] = ()
    """GPUs of the decode node, as many a rank as fit; a rank is tensor parallel over its own."""
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()
    proxy_args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StackPorts:
    """Free ports for all but the proxy's API; `decode_side_channel` is the first of one port a rank."""

    prefill_grpc: int
    prefill_http: int
    prefill_side_channel: int
    decode_grpc: int
    decode_http: int
    decode_side_channel: int
    proxy_admin: int


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process: `http_url` answers /readyz, `grpc_address` is empty for the proxy.

    Processes are stopped wave by wave, those of one `stop_wave` together: the proxy drains while nodes serve.
    """

    role: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    http_url: str
    grpc_address: str
    stop_s: float
    stop_wave: int = 0


@dataclass(frozen=True, slots=True)
class StackPlan:
    """All processes and what a user connects to."""

    processes: tuple[ProcessSpec, ...]
    proxy_url: str
    served_model_name: str
    live_url: str = ""
    """The proxy's live page; empty when the proxy's own arguments say where it is."""


def plan_stack(
    model: Model, options: UpOptions, ports: StackPorts, machine: Machine, environ: Mapping[str, str]
) -> StackPlan:
    """One prefill node, one decode node and the proxy that joins them."""
    proxy_url = f"http://{_reachable(options.host)}:{options.port}"
    prefill_grpc = f"{NODE_HOST}:{ports.prefill_grpc}"
    decode_grpc = f"{NODE_HOST}:{ports.decode_grpc}"
    engine_args = _engine_args(options, machine, environ)
    node_env = _node_environment(model, machine, environ)
    prefill = ProcessSpec(
        role=Role.PREFILL,
        argv=(
            *service_argv(Role.PREFILL),
            model.path,
            *_node_args(ports.prefill_grpc, ports.prefill_http, ports.prefill_side_channel),
            *engine_args,
            *_tensor_parallel(len(options.prefill_devices)),
            *options.prefill_args,
        ),
        env=node_env | _visible(options.prefill_devices),
        http_url=f"http://{NODE_HOST}:{ports.prefill_http}",
        grpc_address=prefill_grpc,
        stop_s=NODE_STOP_S,
        stop_wave=1,
    )
    decode = ProcessSpec(
        role=Role.DECODE,
        argv=(
            *service_argv(Role.DECODE),
            model.path,
            *_node_args(ports.decode_grpc, ports.decode_http, ports.decode_side_channel),
            *("--data-parallel-size", str(options.decode_ranks)),
            *engine_args,
            *_tensor_parallel(len(options.decode_devices) // options.decode_ranks),
            *options.decode_args,
        ),
        env=node_env | _visible(options.decode_devices) | _rank_cores(options.decode_ranks, machine, environ),
        http_url=f"http://{NODE_HOST}:{ports.decode_http}",
        grpc_address=decode_grpc,
        stop_s=NODE_STOP_S,
        stop_wave=1,
    )
    own_admin_port = any(arg.partition("=")[0] == "--admin-port" for arg in options.proxy_args)
    proxy = ProcessSpec(
        role=Role.PROXY,
        argv=(
            *service_argv(Role.PROXY),
            *("--prefill", prefill_grpc, "--decode", decode_grpc),
            *("--host", options.host, "--port", str(options.port)),
            *("--served-model-name", model.served_name),
            *(() if own_admin_port else ("--admin-port", str(ports.proxy_admin))),
            *options.proxy_args,
        ),
        env=_environment(model, environ),
        http_url=proxy_url,
        grpc_address="",
        stop_s=PROXY_STOP_S,
    )
    live_url = "" if own_admin_port else f"http://{NODE_HOST}:{ports.proxy_admin}/lockstep/"
    return StackPlan((proxy, prefill, decode), proxy_url, model.served_name, live_url)


def service_argv(role: Role) -> tuple[str, ...]:
    """How a service is started; -P keeps the working directory from shadowing the installed packages."""
    return (sys.executable, "-P", "-m", MODULES[role])


def _node_args(grpc_port: int, http_port: int, side_channel_port: int) -> tuple[str, ...]:
    return (
        *("--host", NODE_HOST, "--port", str(grpc_port), "--http-port", str(http_port)),
        *("--side-channel-host", NODE_HOST, "--side-channel-port", str(side_channel_port)),
    )


def _engine_args(options: UpOptions, machine: Machine, environ: Mapping[str, str]) -> tuple[str, ...]:
    """vLLM flags that both kinds of node must agree on."""
    dtype = options.dtype or ("float32" if machine.device is Device.CPU else None)
    args: tuple[str, ...] = ("--dtype", dtype) if dtype else ()
    if options.num_speculative_tokens:
        config = {"method": "mtp", "num_speculative_tokens": options.num_speculative_tokens}
        args += ("--speculative-config", json.dumps(config))
    # vLLM on CPU would take 92 % of the machine's memory for each engine; its variable wins over the flag.
    if machine.device is Device.CPU and "VLLM_CPU_KVCACHE_SPACE" not in environ:
        args += ("--kv-cache-memory-bytes", str(CPU_KV_CACHE_BYTES))
    if set(options.prefill_devices) & set(options.decode_devices):
        args += ("--gpu-memory-utilization", str(SHARED_GPU_MEMORY))
    return args


def _tensor_parallel(num_devices: int) -> tuple[str, ...]:
    return ("--tensor-parallel-size", str(num_devices)) if num_devices > 1 else ()


def _visible(devices: tuple[str, ...]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}


def _environment(model: Model, environ: Mapping[str, str]) -> dict[str, str]:
    """For every process: what the user set wins, except where the stack could not work with it."""
    defaults = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    if model.local:
        defaults["HF_HUB_OFFLINE"] = "1"
    return defaults | dict(environ)


def _node_environment(model: Model, machine: Machine, environ: Mapping[str, str]) -> dict[str, str]:
    env = _environment(model, environ)
    if machine.device is not Device.CPU:
        return env
    # One process a rank on one thread: what the CPU platform plugin needs to pin ranks to cores of their own.
    forced = {"LOCKSTEP_CPU_PLATFORM": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return env | forced


def _rank_cores(ranks: int, machine: Machine, environ: Mapping[str, str]) -> dict[str, str]:
    """One core for each decode rank, or no pinning where there are fewer cores than ranks."""
    pinned = "LOCKSTEP_CPU_CORES" in environ
    if machine.device is not Device.CPU or pinned or len(machine.cores) < ranks:
        return {}
    return {"LOCKSTEP_CPU_CORES": ",".join(str(core) for core in machine.cores[:ranks])}


def _reachable(host: str) -> str:
    """The address to reach a server that listens on `host` from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
