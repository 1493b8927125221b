"""A worker without a proxy: takes its place as a real one does, and answers each connection with its number.

Its arguments say what goes wrong: `fail` ends it before it is ready, `deaf` makes it ignore SIGTERM.
"""

import os
import signal
import sys
import time

from proxy.workers.place import Place


def main() -> None:
    place = Place.parse(sys.argv[1])
    if "fail" in sys.argv:
        sys.exit(3)
    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    sock = place.socket()
    sock.listen()
    sock.settimeout(0.05)
    if place.answers_health:
        time.sleep(0.2)  # the others have to wait for this one
    place.ready()
    while True:
        try:
            connection, _ = sock.accept()
        except TimeoutError:
            continue
        with connection:
            asked_first = "health" if place.answers_health else "quiet"
            connection.sendall(f"{place.number} of {place.of} {asked_first} {os.getpid()}".encode())


if __name__ == "__main__":
    main()
