"""docs/operations.md names flags, metrics, alerts and ports that are there."""

import re

import yaml
from typer.main import get_command
from unit.deploy.rendered import DEPLOY, ROOT, env_file
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from decode_node.config import DecodeConfig
from lockstep.cli.main import app
from lockstep.node.config import NodeConfig
from proxy.config import ProxyConfig

PAGE = (ROOT / "docs" / "operations.md").read_text()
ELSEWHERE = {"--build", "--target", "--port", "--model", "--tokenizer", "--ssl-certfile"}
"""docker's, and vLLM's front end's."""


def test_flags() -> None:
    """Of our services, of `lockstep up` and `lockstep batch`, or of vLLM's engine."""
    parsers = [config.parser("", "") for config in (NodeConfig, DecodeConfig, ProxyConfig)]
    parsers.append(AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()))
    known = {option for parser in parsers for option in parser._option_string_actions}
    commands = get_command(app).commands
    known |= {option for name in ("up", "batch") for param in commands[name].params for option in param.opts}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", PAGE))
    assert "--prefill-devices" in named
    assert named <= known | ELSEWHERE


def test_metrics() -> None:
    """docs/metrics.md has each, a histogram's sum aside."""
    documented = set(
        re.findall(r"^\| `(lockstep_\w+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    )
    named = {name.removesuffix("_sum") for name in re.findall(r"lockstep_[a-z_]+[a-z]", PAGE)}
    assert "lockstep_proxy_requests_queued" in named
    assert named <= documented


def test_alerts() -> None:
    """The rules have each."""
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules" / "lockstep.yaml").read_text())
    alerts = {rule.get("alert") for group in rules["groups"] for rule in group["rules"]}
    named = set(re.findall(r"`(Lockstep[A-Z]\w+)`", PAGE))
    assert named
    assert named <= alerts


def test_ports() -> None:
    """The table's are the defaults, and what the manifests give UCX."""
    config = NodeConfig()
    ports = re.findall(r"^\| (\d{4,}|5600 \+ rank) \|", PAGE, re.MULTILINE)
    assert ports == ["8000", str(config.port), str(config.http_port), f"{config.side_channel_port} + rank"]
    ucx = env_file(DEPLOY / "kubernetes" / "base" / "lockstep.env")["UCX_TCP_PORT_RANGE"]
    assert f"any, or {ucx.replace('-', '–')} | `UCX_TCP_PORT_RANGE`" in PAGE  # noqa: RUF001  (the page's dash)
