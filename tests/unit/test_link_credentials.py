"""Tokens and certificates of the link between proxies and nodes: where they come from and what is refused."""

from pathlib import Path

import pytest
from certificates import Authority

from lockstep import exposure
from lockstep.errors import ConfigError
from lockstep.node.config import NodeConfig
from lockstep.rpc import credentials
from proxy.config import ProxyConfig

TOKEN = "0123456789abcdef-first"
OTHER = "0123456789abcdef-second"


def node(**fields: object) -> credentials.Credentials:
    return credentials.of_node(NodeConfig(**fields))


def proxy(**fields: object) -> credentials.Credentials:
    return credentials.of_caller(ProxyConfig(prefill="h:1", decode="h:2", **fields))


def test_token_of_the_environment_is_sent_and_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends read one variable."""
    monkeypatch.setenv("LOCKSTEP_GRPC_TOKEN", TOKEN)
    sent = proxy().metadata
    assert sent == (("authorization", f"Bearer {TOKEN}"),)
    assert node().accepts(sent[0][1])


def test_token_has_no_flag_and_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ps` shows no secret and neither does the configuration in the log."""
    monkeypatch.setenv("LOCKSTEP_GRPC_TOKEN", TOKEN)
    config, rest = NodeConfig.load(["--grpc-token", "x"], "", "")
    assert rest == ["--grpc-token", "x"]
    assert TOKEN not in str(config.masked())
    assert TOKEN not in repr(credentials.of_node(config))
    assert "--grpc-token " not in NodeConfig.parser("", "").format_help()


def test_nodes_accept_each_token_of_the_file_and_a_proxy_sends_the_first(tmp_path: Path) -> None:
    """So tokens are changed without a moment in which one end has only the old one."""
    file = tmp_path / "tokens"
    file.write_text(f"{TOKEN}\n\n  {OTHER}\n")
    of_node = node(grpc_token_file=str(file))
    assert of_node.accepts(f"Bearer {TOKEN}")
    assert of_node.accepts(f"Bearer {OTHER}")
    assert proxy(grpc_token_file=str(file)).metadata[0][1] == f"Bearer {TOKEN}"


@pytest.mark.parametrize(
    "shown", [None, "", TOKEN, f"bearer {TOKEN}", f"Bearer {TOKEN} ", f"Bearer {TOKEN[:-1]}", "Bearer \udce4"]
)
def test_anything_but_the_token_is_refused(shown: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_GRPC_TOKEN", TOKEN)
    assert not node().accepts(shown)


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "no token"), ("short", "16 or more"), ("0123456789 abcdef", "no spaces"), ("ä" * 20, "ASCII")],
)
def test_token_that_cannot_be_one_names_its_flag(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(content)
    with pytest.raises(ConfigError, match=f"--grpc-token-file: .*{message}"):
        node(grpc_token_file=str(file))


def test_missing_file_names_its_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--grpc-token-file: cannot read"):
        node(grpc_token_file=str(tmp_path / "none"))


def test_file_and_variable_together_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of them counts would be a guess."""
    file = tmp_path / "tokens"
    file.write_text(OTHER)
    monkeypatch.setenv("LOCKSTEP_GRPC_TOKEN", TOKEN)
    with pytest.raises(ConfigError, match="LOCKSTEP_GRPC_TOKEN is set as well"):
        node(grpc_token_file=str(file))


def test_certificates_that_do_not_fit_name_their_flags(tmp_path: Path) -> None:
    """gRPC itself would start with them and then refuse every peer."""
    authority = Authority(tmp_path)
    cert, key = (str(file) for file in authority.issue("node"))
    _, other_key = (str(file) for file in authority.issue("other"))
    ca = str(authority.ca_file)
    with pytest.raises(ConfigError, match="goes with --grpc-tls-key-file"):
        node(grpc_tls_cert_file=cert)
    with pytest.raises(ConfigError, match="--grpc-tls-cert-file: not a certificate and its key"):
        node(grpc_tls_cert_file=cert, grpc_tls_key_file=other_key)
    with pytest.raises(ConfigError, match="--grpc-tls-ca-file: not certificates"):
        node(grpc_tls_cert_file=cert, grpc_tls_key_file=key, grpc_tls_ca_file=key)
    with pytest.raises(ConfigError, match="--grpc-tls-ca-file: a node needs"):
        node(grpc_tls_ca_file=ca)
    with pytest.raises(ConfigError, match="a proxy needs --grpc-tls-ca-file"):
        proxy(grpc_tls_cert_file=cert, grpc_tls_key_file=key)


def test_only_a_token_or_a_client_certificate_tells_a_node_who_calls(tmp_path: Path) -> None:
    """TLS alone is secret but open to everybody."""
    authority = Authority(tmp_path)
    cert, key = (str(file) for file in authority.issue("node"))
    own = {"grpc_tls_cert_file": cert, "grpc_tls_key_file": key}
    assert not node().checks_callers
    assert not node(**own).checks_callers
    assert node(**own, grpc_tls_ca_file=str(authority.ca_file)).checks_callers


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_nothing(host: str) -> None:
    exposure.check(host, "--host", guarded=False, insecure_bind=False, needs="keys")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "node.example"])
def test_other_addresses_need_credentials_or_the_flag(host: str) -> None:
    """The message says what to give."""
    with pytest.raises(ConfigError, match=r"--host: .*give keys, or --host 127\.0\.0\.1, or --insecure-bind"):
        exposure.check(host, "--host", guarded=False, insecure_bind=False, needs="keys")
    exposure.check(host, "--host", guarded=True, insecure_bind=False, needs="keys")
    exposure.check(host, "--host", guarded=False, insecure_bind=True, needs="keys")
