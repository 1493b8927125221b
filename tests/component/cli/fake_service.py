"""A service as `lockstep up` sees one: /readyz over HTTP, signals, an exit code, a child like an engine core.

fake_service.py PORT [--ready-after-polls N] [--fail LINE] [--ignore-sigterm] [--child] [--die-when-ready]
                [--stop-log FILE]
"""

import argparse
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SLEEPER = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"


def main() -> None:
    """Serve until told otherwise."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--ready-after-polls", type=int, default=0)
    parser.add_argument("--fail", default="")
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--die-when-ready", action="store_true")
    parser.add_argument("--stop-log", type=Path)
    args = parser.parse_args()
    if args.child:
        # Like vLLM's engine cores: outlives its parent and does not listen to SIGTERM.
        child = subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True)
        sys.stderr.write(f"child pid {child.pid}\n")
    if args.fail:
        sys.stderr.write(f"loading\n{args.fail}\n")
        sys.exit(3)

    def on_sigterm(_number: int, _frame: object) -> None:
        if args.stop_log:
            with args.stop_log.open("a") as log:
                log.write(f"{args.port}\n")
        if not args.ignore_sigterm:
            os._exit(0)

    signal.signal(signal.SIGTERM, on_sigterm)
    serve(args.port, args.ready_after_polls, args.die_when_ready)


def serve(port: int, not_ready_polls: int, die_when_ready: bool) -> None:
    """Answer /readyz: 503 with a reason so many times, then 200, and exit after that if told to.

    Counted, not timed: on a busy machine a second may pass before anybody asks.
    """
    polls = itertools.count()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ready = self.path == "/readyz" and next(polls) >= not_ready_polls
            body = json.dumps({"status": "ready"} if ready else {"reason": "warming up"}).encode()
            self.send_response(200 if ready else 503)
            self.end_headers()
            self.wfile.write(body)
            if ready and die_when_ready:
                self.connection.shutdown(socket.SHUT_WR)
                os._exit(9)

        def log_message(self, format: str, *args: object) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
