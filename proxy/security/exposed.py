"""What the proxy's ports need before others than this machine may reach them."""

import logging
import ssl
from argparse import Namespace
from typing import Any

from lockstep import exposure
from proxy.config import ProxyConfig
from proxy.security.key_source import KeySource

logger = logging.getLogger(__name__)

_NEEDS = "--api-key-file"


def check(config: ProxyConfig, args: Namespace, keys: KeySource) -> None:
    """Raises ConfigError for a port that others reach and that asks for nothing; `args` are vLLM's."""
    host = args.host or ""
    client_certificates = args.ssl_certfile and args.ssl_cert_reqs == ssl.CERT_REQUIRED
    exposure.check(
        host,
        "--host",
        guarded=keys.configured or bool(client_certificates),
        insecure_bind=config.insecure_bind,
        needs=_NEEDS,
    )
    if config.admin_port is not None:
        exposure.check(
            config.admin_host,
            "--admin-host",
            guarded=keys.configured,
            insecure_bind=config.insecure_bind,
            needs=_NEEDS,
        )
    if keys.configured and not args.ssl_certfile and not exposure.is_loopback(host):
        logger.warning(
            "API keys come over plain HTTP: give --ssl-certfile, or keep the way here from the outside"
        )


def tls(args: Namespace) -> dict[str, Any]:
    """uvicorn's settings from vLLM's flags."""
    return {
        name: getattr(args, name)
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers")
    }
