"""Refusals that are given before vLLM's front end has seen a request, in the error shapes of the two APIs."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.types import Scope, Send

NO_KEY = (
    "You didn't provide an API key. Provide it in an Authorization header using Bearer auth "
    "(i.e. Authorization: Bearer YOUR_KEY)."
)

_OPENAI_TYPES = {429: "rate_limit_error", 503: "service_unavailable_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


async def refuse(
    scope: Scope,
    send: Send,
    status: int,
    message: str,
    code: str,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Answer with an error; uvicorn reads what is left of the request's body and forgets it."""
    body = json.dumps(_body(scope["path"], status, message, code)).encode()
    fields = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    start = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


def _body(path: str, status: int, message: str, code: str) -> dict[str, Any]:
    if path.rstrip("/").endswith("/v1/messages"):
        kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = _OPENAI_TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
