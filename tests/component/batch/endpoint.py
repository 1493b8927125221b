"""A small HTTP server in the place of an OpenAI endpoint: notes what it is asked, does as it is told."""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(slots=True)
class Answer:
    """What the endpoint says to one request; `hold` is waited for first."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    hold: threading.Event | None = None
    hang_up: bool = False


class Endpoint:
    """Each request is told by its `prompt`; `script` chooses what it gets, by that and how often it came."""

    def __init__(self) -> None:
        self.script: Callable[[str, int], Answer] = lambda prompt, times: Answer()
        self.asked: list[tuple[str, float]] = []
        self.headers: list[dict[str, str]] = []
        self.running = self.most_running = 0
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def times(self, prompt: str) -> list[float]:
        """When it was asked so, on the monotonic clock."""
        return [at for asked, at in self.asked if asked == prompt]

    def _take(self, prompt: str, headers: dict[str, str]) -> Answer:
        with self._lock:
            self.asked.append((prompt, time.monotonic()))
            self.headers.append(headers)
            self.running += 1
            self.most_running = max(self.running, self.most_running)
        return self.script(prompt, len(self.times(prompt)))

    def _ended(self) -> None:
        with self._lock:
            self.running -= 1

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = endpoint._take(body["prompt"], dict(self.headers))
                if answer.hold is not None:
                    answer.hold.wait(30)
                endpoint._ended()
                if answer.hang_up:
                    self.close_connection = True
                    return
                content = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
                self.send_response(answer.status)
                for name, value in {**answer.headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # the command may be gone
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Nothing on the test's output."""

        return Handler
