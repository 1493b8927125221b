"""Turns a node's command line into a VllmConfig: our flags, vLLM's flags, then what the role owns."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.network_utils import get_ip

from lockstep import health
from lockstep.errors import ConfigError
from lockstep.node.config import NodeConfig
from lockstep.node.role import Role

_OWNED = {
    "--kv-transfer-config": "Lockstep sets the KV connector",
    "--scheduler-cls": "Lockstep sets the scheduler",
    "--data-parallel-external-lb": "a Lockstep node serves all ranks of its host",
}


def load(role: Role, argv: Sequence[str]) -> tuple[NodeConfig, AsyncEngineArgs]:
    """Read the command line; raises ConfigError for a bad value and exits 2 for an unknown flag."""
    prog = f"lockstep {role.name}"
    description = f"Run a Lockstep {role.name} node. All of vLLM's engine flags are accepted as well."
    if "-h" in argv or "--help" in argv:
        role.config.parser(f"{prog} MODEL", description).print_help()
        sys.stdout.write("\nvLLM's engine flags follow; they keep their names and meanings.\n\n")
        _vllm_parser(prog).print_help()
        raise SystemExit(0)
    config, rest = role.config.load(argv, prog, description)
    return config, _engine_args(prog, rest)


def create_vllm_config(role: Role, config: NodeConfig, args: AsyncEngineArgs) -> VllmConfig:
    """Resolve the engine configuration as vLLM's server does, with the role's own settings applied."""
    _set_environment(config)
    role.apply_flags(args, config)
    with _vllm_errors():
        vllm_config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    role.check_config(vllm_config)
    parallel = vllm_config.parallel_config
    check_side_channel_ports(parallel.data_parallel_rank, parallel.data_parallel_size_local)
    return vllm_config


def check_side_channel_ports(first_rank: int, num_local_ranks: int) -> None:
    """Refuse ports that cannot be bound: vLLM binds them in a thread of the engine and would wait for ever.

    Each rank's port is the base plus its data-parallel index (vLLM nixl/base_scheduler.py:76). Raises
    ConfigError.
    """
    host = os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"]
    base = int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"])
    for rank in range(first_rank, first_rank + num_local_ranks):
        if base + rank > 65535:
            raise ConfigError(f"--side-channel-port: {base} plus data-parallel index {rank} is above 65535")
        health.bind(host, base + rank, f"--side-channel-host, --side-channel-port (rank {rank})").close()


@contextlib.contextmanager
def _vllm_errors() -> Iterator[None]:
    """vLLM's refusals as ConfigError. pydantic's are ValueErrors; a model that is not there is an OSError."""
    try:
        yield
    except (ValueError, OSError, NotImplementedError, RuntimeError) as error:
        raise ConfigError(f"vLLM refuses this configuration: {error}") from error


def _vllm_parser(prog: str) -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser(prog=prog, allow_abbrev=False)
    parser.add_argument("model_tag", metavar="MODEL", nargs="?", help="model directory or hub id")
    return AsyncEngineArgs.add_cli_args(parser)


def _engine_args(prog: str, argv: list[str]) -> AsyncEngineArgs:
    for argument in argv:
        flag = argument.split("=", 1)[0].replace("_", "-")
        if flag in _OWNED:
            raise ConfigError(f"{flag}: {_OWNED[flag]}; remove this flag")
    namespace = _vllm_parser(prog).parse_args(argv)
    if namespace.model_tag is None:
        raise ConfigError("MODEL: no model given; name a model directory or a hub id as the first argument")
    namespace.model = namespace.model_tag
    if namespace.model.startswith((".", "/", "~")) and not Path(namespace.model).expanduser().is_dir():
        raise ConfigError(f"MODEL: no such directory: {namespace.model}")
    with _vllm_errors():
        return AsyncEngineArgs.from_cli_args(namespace)


def _set_environment(config: NodeConfig) -> None:
    """Set what vLLM reads from the environment only; the engine processes inherit it."""
    host = config.side_channel_host or get_ip()
    if host in ("0.0.0.0", "::"):
        raise ConfigError("--side-channel-host: this machine's address is not known; give it")
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(config.side_channel_port)
    # Everything here is built and run on the V1 model runner (docs/architecture.md, "Decode in lockstep").
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
