"""A node that other machines reach asks who calls it, or does not start."""

import pytest

from lockstep.errors import ConfigError
from lockstep.node.config import NodeConfig
from lockstep.node.runtime import Node
from prefill_node.service import ROLE


def test_a_node_without_credentials_stays_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is every address."""
    with pytest.raises(ConfigError, match=r"--host: 0\.0\.0\.0 .*--grpc-token-file"):
        Node(ROLE, NodeConfig())
    Node(ROLE, NodeConfig(host="127.0.0.1"))
    Node(ROLE, NodeConfig(insecure_bind=True))
    monkeypatch.setenv("LOCKSTEP_GRPC_TOKEN", "0123456789abcdef")
    Node(ROLE, NodeConfig())
