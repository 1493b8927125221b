"""Ports of the proxy that others reach: what they have to ask for before it starts."""

from argparse import Namespace
from typing import Any

import pytest

from lockstep.errors import ConfigError
from proxy.config import ProxyConfig
from proxy.security import exposed
from proxy.security.key_source import KeySource
from proxy.security.keys import parse

NO_KEYS = KeySource((), None)
KEYS = KeySource(parse("web sk-of-the-web-team-1", "test"), None)


def check(keys: KeySource, host: str | None = None, tls: Namespace | None = None, **config: Any) -> None:
    args = tls or Namespace(ssl_certfile=None, ssl_cert_reqs=0)
    args.host = host
    exposed.check(ProxyConfig(prefill="h:1", decode="h:2", **config), args, keys)


@pytest.mark.parametrize("host", [None, "0.0.0.0", "10.0.0.1"])
def test_the_api_needs_keys_where_others_reach_it(host: str | None) -> None:
    """vLLM's default is every address."""
    with pytest.raises(ConfigError, match=r"--host: .*--api-key-file"):
        check(NO_KEYS, host)
    check(KEYS, host)
    check(NO_KEYS, host, insecure_bind=True)
    check(NO_KEYS, "127.0.0.1")


def test_client_certificates_will_do_and_tls_alone_will_not() -> None:
    with pytest.raises(ConfigError):
        check(NO_KEYS, tls=Namespace(ssl_certfile="cert", ssl_cert_reqs=0))
    check(NO_KEYS, tls=Namespace(ssl_certfile="cert", ssl_cert_reqs=2))


def test_admin_port_needs_them_too() -> None:
    """Client certificates are not asked for there."""
    certificates = Namespace(ssl_certfile="cert", ssl_cert_reqs=2)
    with pytest.raises(ConfigError, match=r"--admin-host: .*--api-key-file"):
        check(NO_KEYS, tls=certificates, admin_port=1, admin_host="0.0.0.0")
    check(KEYS, admin_port=1, admin_host="0.0.0.0")
    check(KEYS, admin_port=1)
