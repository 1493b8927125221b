"""Builds the front end's VllmConfig from what the nodes describe, so that it refuses and defaults alike."""

import json
from argparse import Namespace

from vllm.config import ParallelConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from lockstep.errors import ConfigError
from proxy.nodes import Node


def from_nodes(args: Namespace, prefill: Node, decode: Node) -> VllmConfig:
    """Resolve vLLM's configuration without an engine, as its render server does (launchers/render/entry.py).

    Fills in `args` too, because the front end reads the model's name from there. --model and --tokenizer may
    be given where this machine has the files at another path; the other values are the nodes'.
    """
    described = decode.description
    _fill(args, prefill, decode)
    try:
        engine_args = AsyncEngineArgs.from_cli_args(args)
        model_config = engine_args.create_model_config()
        # The front end runs no kernels, and the check of their support would need the nodes' device.
        model_config.quantization = None
        parallel_config = ParallelConfig()
        config = VllmConfig(
            model_config=model_config,
            parallel_config=parallel_config,
            speculative_config=engine_args.create_speculative_config(model_config, parallel_config),
            logging_config=engine_args.create_logging_config(),
            structured_outputs_config=engine_args.create_structured_outputs_config(),
            observability_config=engine_args.create_observability_config(),
        )
    except (ValueError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"--model: the files of {described.model!r} that the nodes serve cannot be used here: {error}"
        ) from error
    # Set after construction: they bound what a request may ask for, and must not start anything here.
    config.scheduler_config.max_num_seqs = max(rank.max_num_seqs for rank in decode.ranks)
    return config


def _fill(args: Namespace, prefill: Node, decode: Node) -> None:
    described = decode.description
    if args.served_model_name is None:
        args.served_model_name = [described.model]
    if not _given(args, "model"):
        args.model = described.model
    if args.tokenizer is None:
        args.tokenizer = args.model if described.tokenizer == described.model else described.tokenizer
    args.revision = described.revision or None
    args.dtype = described.dtype
    args.trust_remote_code = described.trust_remote_code
    args.generation_config = described.generation_config or "auto"
    args.max_model_len = min(described.served_context_limit, prefill.description.served_context_limit)
    if described.speculative_config:
        args.speculative_config = json.loads(described.speculative_config)


def _given(args: Namespace, name: str) -> bool:
    return bool(getattr(args, name) != getattr(AsyncEngineArgs, name))
