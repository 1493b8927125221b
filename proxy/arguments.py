"""Turns the proxy's command line into our configuration and vLLM's front-end arguments."""

import sys
from argparse import Namespace
from collections.abc import Sequence

from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import validate_api_server_args
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from lockstep.errors import ConfigError
from proxy.config import ProxyConfig
from proxy.tracing import endpoint

PROG = "lockstep proxy"

_OWNED = {
    "model_tag": "the nodes say which model they serve",
    "revision": "the nodes say which revision they serve",
    "max_model_len": "the nodes say how long a context they serve",
    "speculative_config": "the nodes say how they speculate",
    "kv_transfer_config": "the proxy holds no KV cache",
    "headless": "the proxy runs no engine",
    "api_server_count": "give --workers instead",
    "enable_lora": "LoRA adapters are not served",
    "lora_modules": "LoRA adapters are not served",
    "enable_prompt_embeds": "prompts of embeddings are not served",
    "uds": "the proxy listens on --host and --port",
}
"""Arguments that have no meaning on a proxy, and why; by vLLM's argument names."""


def load(argv: Sequence[str]) -> tuple[ProxyConfig, Namespace]:
    """Read the command line; raises ConfigError for a bad value and exits 2 for an unknown flag."""
    description = "Run a Lockstep proxy. All of vLLM's front-end flags are accepted as well."
    if "-h" in argv or "--help" in argv:
        ProxyConfig.parser(PROG, description).print_help()
        sys.stdout.write("\nvLLM's flags follow; they keep their names and meanings.\n\n")
        _vllm_parser().print_help()
        raise SystemExit(0)
    config, rest = ProxyConfig.load(argv, PROG, description)
    return config, _front_end_args(rest)


def _vllm_parser() -> FlexibleArgumentParser:
    return make_arg_parser(FlexibleArgumentParser(prog=PROG, allow_abbrev=False))


def _front_end_args(argv: list[str]) -> Namespace:
    parser = _vllm_parser()
    args: Namespace = parser.parse_args(argv)
    for name, why in _OWNED.items():
        if getattr(args, name) != parser.get_default(name):
            flag = "MODEL" if name == "model_tag" else "--" + name.replace("_", "-")
            raise ConfigError(f"{flag}: {why}; remove it")
    endpoint.prepare(args)
    try:
        validate_parsed_serve_args(args)
        if args.tool_parser_plugin:
            ToolParserManager.import_tool_parser(args.tool_parser_plugin)
        if args.reasoning_parser_plugin:
            ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
        validate_api_server_args(args)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(str(error.args[0] if error.args else error)) from error
    return args
