"""Runs a node over simulated engines: the role's own process, with other engine cores in it."""

import types
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from vllm import envs
from vllm.config import VllmConfig
from vllm.tokenizers import get_tokenizer

from lockstep.errors import ConfigError
from lockstep.node import runtime
from lockstep.node.config import NodeConfig
from lockstep.node.engine_cores import EngineCores
from lockstep.node.role import Role
from lockstep.sim.answers import Voice
from lockstep.sim.config import SimFigures
from lockstep.sim.decode import SimulatedDecode
from lockstep.sim.engine import SimulatedEngine
from lockstep.sim.prefill import SimulatedPrefill
from lockstep.sim.rows import ReadLeg


def main(role: Role, read_leg: ReadLeg, argv: Sequence[str]) -> int:
    """As lockstep.node.runtime.main, with the flags of lockstep.sim.config beside the role's own."""
    return runtime.main(simulated(role), argv, partial(start_simulation, role.name, read_leg))


def simulated(role: Role) -> Role:
    """The role with the simulation's flags on top of its own."""
    return replace(role, config=types.new_class("SimulatedConfig", (SimFigures, role.config)))


async def start_simulation(
    role_name: str, read_leg: ReadLeg, config: NodeConfig, vllm_config: VllmConfig
) -> EngineCores:
    """The engines that the configuration asks for, running. Raises ConfigError."""
    if not isinstance(config, SimFigures):
        raise TypeError("a simulated node's configuration has the simulation's figures")
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    cache.num_gpu_blocks = cache.num_gpu_blocks_override or config.sim_kv_blocks
    if parallel.data_parallel_size != parallel.data_parallel_size_local:
        raise ConfigError("--data-parallel-size-local: all ranks of a simulated group are in one process")
    voice = _voice(vllm_config, config.sim_answer_tokens)
    engine: SimulatedEngine
    if role_name == "prefill":
        engine = SimulatedPrefill(
            config,
            vllm_config,
            voice,
            read_leg,
            engine_ids=_engine_ids(vllm_config),
            lease_s=config.kv_lease_s,
        )
        try:
            await engine.listen(envs.VLLM_NIXL_SIDE_CHANNEL_HOST, envs.VLLM_NIXL_SIDE_CHANNEL_PORT)
        except OSError as error:
            raise ConfigError(f"--side-channel-port: {error}") from error
    else:
        engine = SimulatedDecode(
            config,
            vllm_config,
            voice,
            read_leg,
            registration_deadline_s=config.registration_deadline_s,
        )
    engine.start()
    return engine


def _engine_ids(vllm_config: VllmConfig) -> list[str]:
    """As lockstep.node.describe says them."""
    engine_id, size = vllm_config.kv_transfer_config.engine_id, vllm_config.parallel_config.data_parallel_size
    return [f"{engine_id}_dp{rank}" for rank in range(size)] if size > 1 else [engine_id]


def _voice(vllm_config: VllmConfig, natural_end: int) -> Voice:
    model = vllm_config.model_config
    tokenizer = get_tokenizer(
        model.tokenizer,
        tokenizer_mode=model.tokenizer_mode,
        trust_remote_code=model.trust_remote_code,
        revision=model.tokenizer_revision,
    )
    special = frozenset(tokenizer.all_special_ids)
    fallback = next(token for token in range(model.get_vocab_size()) if token not in special)
    return Voice(tokenizer.eos_token_id, special, fallback, natural_end)
