"""The one place where Lockstep's errors become what vLLM's front end makes a status, body or SSE event of."""

from http import HTTPStatus
from typing import Any

from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GracefulHTTPError, VLLMError, VLLMValidationError

from lockstep.errors import ERROR_CLASSES, InternalError, InvalidRequestError, LockstepError, WrongLegError


class ServiceError(GracefulHTTPError):
    """A Lockstep error with its status; AsyncLLM.generate passes it through as it is (async_llm.py:806)."""


def to_front_end(error: LockstepError, request_id: str) -> VLLMError:
    """The exception to put into a request's output queue, or to raise before there is one.

    A request error keeps vLLM's own class, so that body and status are those of a plain vLLM server; the
    others name the request, because the cause is only in the log.
    """
    if isinstance(error, WrongLegError):
        error = _internal()
    if isinstance(error, InvalidRequestError):
        return VLLMValidationError(str(error), parameter=error.param)
    return ServiceError(f"{error} (request id: {request_id})", HTTPStatus(error.http_status))


def from_node(code: str, message: str) -> LockstepError:
    """The error that a node named on the wire."""
    cls = ERROR_CLASSES.get(code, InternalError)
    if cls in (LockstepError, InternalError, WrongLegError):
        return _internal()
    return cls(message)


def body(error: VLLMError) -> dict[str, Any]:
    """The body that vLLM's front end makes of an error."""
    response: dict[str, Any] = create_error_response(error).model_dump()
    return response


def _internal() -> InternalError:
    return InternalError("The request failed inside the service.")
