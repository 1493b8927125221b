"""Asks the service in this container if it takes requests: exit status 0 if so, else 1 and one line why."""

import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4.0


def why_not_ready(port: int) -> str:
    """Empty when /readyz answers 200."""
    # Without the proxies of the environment: the request stays in this container.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/readyz", timeout=TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as answer:
        return f"{answer.code}: {answer.read(500).decode(errors='replace')}"
    except OSError as error:
        return f"no answer: {error}"


if __name__ == "__main__":
    sys.exit(why_not_ready(int(sys.argv[1])) or 0)
