"""Serves the admin port beside the API, from before the first node is there until the proxy ends."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from lockstep import health
from lockstep.status import StatusDocument
from proxy.config import ProxyConfig
from proxy.flow import Flow
from proxy.live.app import PAGE_PATH, build_app
from proxy.live.feed import Feed

logger = logging.getLogger(__name__)

_CLOSE_CONNECTIONS_S = 2


@contextlib.asynccontextmanager
async def serving(
    config: ProxyConfig, flow: Flow, status: Callable[[], Awaitable[StatusDocument]]
) -> AsyncIterator[None]:
    """Serve while in the block, if there is an admin port; raises ConfigError for one that is in use."""
    if config.admin_port is None:
        yield
        return
    feed, stop = Feed(flow, status), asyncio.Event()
    with contextlib.closing(health.bind(config.admin_host, config.admin_port, "--admin-port")) as sock:
        app = build_app(feed, config.admin_host)
        feeding = asyncio.create_task(feed.run(), name="live feed")
        answering = asyncio.create_task(
            health.serve(app, sock, stop, _CLOSE_CONNECTIONS_S), name="admin port"
        )
        logger.info("live page: http://%s:%d%s", *sock.getsockname()[:2], PAGE_PATH)
        try:
            yield
        finally:
            feed.viewers.close()  # open streams would be waited for
            stop.set()
            feeding.cancel()
            await asyncio.gather(feeding, answering, return_exceptions=True)
