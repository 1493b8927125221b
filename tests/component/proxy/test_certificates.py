"""A new certificate for clients is taken up while the proxy serves."""

import asyncio
import shutil
import socket
import ssl
from argparse import Namespace
from pathlib import Path
from typing import Any

import uvicorn
from certificates import Authority

from proxy.security.certificates import refreshed

DEADLINE_S = 20.0


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def served_by(port: int) -> bytes:
    """The certificate that a new connection is shown."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return bytes(shown)


async def test_new_files_are_served_without_a_restart(tmp_path: Path) -> None:
    """As vLLM's flag promises."""
    authority = Authority(tmp_path)
    first, second = authority.issue("first"), authority.issue("second")
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    for source, target in zip(first, (cert, key), strict=True):
        shutil.copy(source, target)
    config = uvicorn.Config(
        app, ssl_certfile=str(cert), ssl_keyfile=str(key), lifespan="off", log_level="error"
    )
    server = uvicorn.Server(config)
    args = Namespace(enable_ssl_refresh=True, ssl_certfile=str(cert))
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        with refreshed(config, args):
            serving = asyncio.create_task(server.serve(sockets=[sock]))
            async with asyncio.timeout(DEADLINE_S):
                while not server.started:  # noqa: ASYNC110 - of another task
                    await asyncio.sleep(0.01)
                before = await served_by(port)
                while await served_by(port) == before:
                    # Written anew each time: the watch may begin after the first.
                    for source, target in zip(second, (cert, key), strict=True):
                        shutil.copy(source, target)
                    await asyncio.sleep(0.2)
            server.should_exit = True
            await serving
