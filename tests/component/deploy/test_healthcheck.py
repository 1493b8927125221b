"""The images' health check as the container runs it: a script, its exit status, and why on standard error."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "deploy" / "images" / "healthcheck.py"


@contextmanager
def service(status: int, body: bytes) -> Iterator[int]:
    """A server whose /readyz answers so; gives its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/readyz" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def check(port: int) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-I", str(SCRIPT), str(port)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_ready() -> None:
    """200 is healthy."""
    with service(200, b'{"status": "ready"}') as port:
        assert check(port).returncode == 0


def test_not_ready_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason that the service gives, whatever proxy the environment names."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with service(503, b'{"reason": "warming up"}') as port:
        answer = check(port)
    assert (answer.returncode, answer.stderr) == (1, '503: {"reason": "warming up"}\n')


def test_nothing_listens() -> None:
    """A service that has not bound its port yet, or is gone."""
    with service(200, b"") as port:
        pass
    answer = check(port)
    assert answer.returncode == 1
    assert answer.stderr.startswith("no answer: ")
