"""Takes up a new certificate for clients while it serves, where vLLM's --enable-ssl-refresh asks for that."""

import contextlib
from argparse import Namespace
from collections.abc import Iterator

import uvicorn
from vllm.entrypoints.launchers.utils.ssl import SSLCertRefresher


@contextlib.contextmanager
def refreshed(config: uvicorn.Config, args: Namespace) -> Iterator[None]:
    """While in the block; connections that are open keep theirs. Needs a running event loop."""
    if not args.enable_ssl_refresh or not args.ssl_certfile:
        yield
        return
    if not config.loaded:
        config.load()
    refresher = SSLCertRefresher(
        ssl_context=config.ssl,
        key_path=config.ssl_keyfile,
        cert_path=config.ssl_certfile,
        ca_path=config.ssl_ca_certs,
    )
    try:
        yield
    finally:
        refresher.stop()
