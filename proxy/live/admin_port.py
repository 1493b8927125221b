"""Serves the admin port beside the API, from before the first node is there until the proxy ends."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.types import ASGIApp

from lockstep import health
from lockstep.exposure import is_loopback
from lockstep.status import StatusDocument
from proxy.config import ProxyConfig
from proxy.flow import Flow
from proxy.live.app import PAGE_PATH, build_app
from proxy.live.feed import Feed
from proxy.security.guard import KeyGuard
from proxy.security.key_source import KeySource

logger = logging.getLogger(__name__)

_CLOSE_CONNECTIONS_S = 2


@contextlib.asynccontextmanager
async def serving(
    config: ProxyConfig,
    flow: Flow,
    status: Callable[[], Awaitable[StatusDocument]],
    keys: KeySource,
    tls: Mapping[str, Any],
) -> AsyncIterator[None]:
    """Serve while in the block, if there is an admin port; raises ConfigError for one that is in use.

    Others than this machine have to show an admin's key, where there are keys, and come over TLS, where there
    is a certificate.
    """
    if config.admin_port is None:
        yield
        return
    feed, stop = Feed(flow, status), asyncio.Event()
    with contextlib.closing(health.bind(config.admin_host, config.admin_port, "--admin-port")) as sock:
        app: ASGIApp = build_app(feed, config.admin_host)
        if is_loopback(config.admin_host):
            tls = health.NO_TLS
        elif keys.configured:
            app = KeyGuard(app, keys, flow.metrics.refused, admin_only=True)
        feeding = asyncio.create_task(feed.run(), name="live feed")
        answering = asyncio.create_task(
            health.serve(app, sock, stop, _CLOSE_CONNECTIONS_S, tls), name="admin port"
        )
        scheme = "https" if tls.get("ssl_certfile") else "http"
        logger.info("live page: %s://%s:%d%s", scheme, *sock.getsockname()[:2], PAGE_PATH)
        try:
            yield
        finally:
            feed.viewers.close()  # open streams would be waited for
            stop.set()
            feeding.cancel()
            await asyncio.gather(feeding, answering, return_exceptions=True)
