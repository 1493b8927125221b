"""`lockstep status` as a process, against a small HTTP server in the proxy's place."""

import http.server
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from unit.cli.status_documents import usual

LOCKSTEP = str(Path(sys.executable).with_name("lockstep"))
DOCUMENT = msgspec.json.format(msgspec.json.encode(usual()), indent=3)
"""Laid out as no encoder of ours does it."""


@contextmanager
def serving(body: bytes, code: int = 200, hangs: bool = False) -> Iterator[str]:
    """A server that answers /lockstep/status so, and 404 elsewhere; `hangs` sends half and no more."""
    done = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/lockstep/status"
            self.send_response(code if found else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if hangs else body)
            self.wfile.flush()
            if hangs:
                done.wait(60)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        done.set()
        server.shutdown()
        thread.join()
        server.server_close()


def run(*args: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([LOCKSTEP, "status", *args], capture_output=True, timeout=60, check=False)


def test_json_is_the_proxys_answer_as_it_is() -> None:
    """Byte for byte, so that fields which this command does not know are there too."""
    with serving(DOCUMENT) as url:
        result = run("--url", url, "--json")
    assert (result.returncode, result.stdout, result.stderr) == (0, DOCUMENT + b"\n", b"")


def test_tables_in_a_pipe() -> None:
    """Without a terminal the lines have up to 100 columns and no colours; a slash at the end is no matter."""
    with serving(DOCUMENT) as url:
        result = run("--url", f"{url}/")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.decode().splitlines()
    assert lines[0] == f"pico at {url}: ready, up 3 min, Lockstep 0.1.0"
    assert any("100,010  99.9%  peer 8, short_row 3" in line for line in lines)
    assert 90 < max(map(len, lines)) <= 100
    assert b"\x1b" not in result.stdout


def test_nothing_there_is_one_line_and_code_1() -> None:
    """With the address that was tried."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    result = run("--url", url)
    assert (result.returncode, result.stdout) == (1, b"")
    assert result.stderr.decode().startswith(f"lockstep status: no answer from {url}: ")
    assert result.stderr.count(b"\n") == 1


def test_deadline_covers_the_whole_answer() -> None:
    """A proxy that begins to answer and stops is no answer either."""
    began_s = time.monotonic()
    with serving(DOCUMENT, hangs=True) as url:
        result = run("--url", url, "--timeout-s", "0.5", "--json")
    assert time.monotonic() - began_s < 30
    assert (result.returncode, result.stdout) == (1, b"")
    assert result.stderr.decode() == f"lockstep status: no answer from {url} within 0.5 s\n"


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        (b"Not Found", 404, "/lockstep/status answers 404: is this a Lockstep proxy?"),
        (b"<html>", 200, "the answer is no status document of this version: "),
        (b'{"proxy": 1}', 200, "the answer is no status document of this version: "),
    ],
)
def test_other_answers_are_one_line_and_code_1(body: bytes, code: int, says: str) -> None:
    """Another server, and a document of a version that this command does not know."""
    with serving(body, code) as url:
        result = run("--url", url)
    assert (result.returncode, result.stdout) == (1, b"")
    assert says in result.stderr.decode()
    assert result.stderr.count(b"\n") == 1


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://[", "ftp://h"])
def test_wrong_url_is_one_line_and_code_1(url: str) -> None:
    """A mistyped --url is no traceback."""
    result = run("--url", url)
    assert result.returncode == 1
    assert result.stderr.decode().startswith(f"lockstep status: no answer from {url}: ")
    assert result.stderr.count(b"\n") == 1
