"""Refuses headers that mean two things, or that would end up as they are in logs and in ids."""

import re
from collections.abc import Callable, Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from lockstep.errors import InvalidRequestError
from proxy.metrics import Refusal
from proxy.security import answers

REQUEST_ID_CHARACTERS = 128
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@|~-]{1,%d}" % REQUEST_ID_CHARACTERS)
SESSION_ID_CHARACTERS = 256
_SESSION_ID = re.compile(rb"[\x20-\x7e]{0,%d}" % SESSION_ID_CHARACTERS)
_PRIORITY = re.compile(rb"[+-]?[0-9]{1,18}")

_ONCE = frozenset(
    {
        *(b"authorization", b"x-api-key", b"host", b"content-length", b"content-type"),
        *(b"x-request-id", b"x-data-parallel-rank", b"x-vllm-priority", b"x-session-id"),
    }
)
"""Of two of these, one program takes the first and the next one the last."""

_FORMS = {
    b"x-request-id": (
        _REQUEST_ID,
        f"X-Request-Id must be 1 to {REQUEST_ID_CHARACTERS} letters, digits and . _ : / + = @ | ~ -",
    ),
    b"x-session-id": (
        _SESSION_ID,
        f"X-Session-ID must be at most {SESSION_ID_CHARACTERS} printable ASCII characters",
    ),
    # vLLM takes one that is no number for none (generate/base/serving.py::_get_priority).
    b"x-vllm-priority": (_PRIORITY, "X-Vllm-Priority must be an integer"),
}


def problem(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """What is wrong with the headers of a request, with names in lower case, or None."""
    seen: set[bytes] = set()
    for name, value in headers:
        if name not in _ONCE:
            continue
        if name in seen:
            return f"The header {name.decode()} was sent twice."
        seen.add(name)
        form = _FORMS.get(name)
        if form is not None and not form[0].fullmatch(value):
            return f"{form[1]}."
    return None


def check_request_id(request_id: str) -> None:
    """A client may give the id in the body too (vLLM's `request_id`); raises InvalidRequestError.

    `request_id` is what vLLM made of it, with a prefix and a number.
    """
    printable = request_id.isascii() and request_id.isprintable()
    if len(request_id) > 2 * REQUEST_ID_CHARACTERS or not printable:
        raise InvalidRequestError(
            f"request_id must be at most {REQUEST_ID_CHARACTERS} printable ASCII characters.", "request_id"
        )


class HeaderCheck:
    """ASGI middleware; costs nothing per token."""

    def __init__(self, app: ASGIApp, refused: Callable[[Refusal], None]) -> None:
        self._app = app
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wrong = problem(scope["headers"]) if scope["type"] == "http" else None
        if wrong is None:
            await self._app(scope, receive, send)
            return
        self._refused(Refusal.HEADER)
        await answers.refuse(scope, send, 400, wrong, "invalid_header")
