"""The one tree of errors that Lockstep raises, and how each looks to a client.

    LockstepError
    ├── ConfigError               a flag, environment variable or file is wrong; the process does not start
    ├── InvalidRequestError       the request cannot be served as it stands
    │   └── WrongLegError         a node was sent work of the other role
    ├── UnavailableError          nothing can take the request now; the same request may work later
    │   ├── NoPrefillNodeError    no ready prefill rank fits
    │   ├── NoDecodeNodeError     no ready decode rank fits
    │   ├── DrainingError         the node or proxy is shutting down
    │   ├── OverloadedError       as many requests wait as may, or this one has waited too long
    │   ├── NodeLostError         the node that held the request went away
    │   └── AttemptsExhaustedError  as many attempts as allowed ended without an answer
    ├── RateLimitedError          the API key has used up what it may
    ├── KVTransferError           the KV cache did not reach the decode rank
    ├── DeadlineError             the request did not finish in its time
    └── InternalError             anything else; the cause is in the log only

Each class declares what the mapper to HTTP (proxy/http_errors.py) needs; over gRPC its name travels in
`RequestError.code`. The message is shown to the client, so it never holds a prompt, a path or an address.
"""

from typing import ClassVar


class LockstepError(Exception):
    """Base of all; not raised itself."""

    http_status: ClassVar[int] = 500
    type: ClassVar[str] = "Internal Server Error"
    retryable: ClassVar[bool] = False


class ConfigError(LockstepError):
    """A flag, environment variable or file is wrong; the message names it and a value that works."""


class InvalidRequestError(LockstepError):
    """The request cannot be served as it stands; `param` names the field."""

    http_status = 400
    type = "BadRequestError"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class WrongLegError(InvalidRequestError):
    """A node was sent work of the other role."""


class UnavailableError(LockstepError):
    """Nothing can take the request now; the same request may work later."""

    http_status = 503
    type = "Service Unavailable"
    retryable = True


class NoPrefillNodeError(UnavailableError):
    """No ready prefill rank fits."""


class NoDecodeNodeError(UnavailableError):
    """No ready decode rank fits."""


class DrainingError(UnavailableError):
    """The node or proxy is shutting down."""


class OverloadedError(UnavailableError):
    """As many requests wait as may, or this one has waited too long."""


class NodeLostError(UnavailableError):
    """The node that held the request went away."""


class AttemptsExhaustedError(UnavailableError):
    """As many attempts as allowed ended without an answer."""


class RateLimitedError(LockstepError):
    """The API key has used up what it may; `retry_after_s` says for how long."""

    http_status = 429
    type = "Too Many Requests"
    retryable = True

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class KVTransferError(LockstepError):
    """The KV cache did not reach the decode rank."""

    http_status = 503
    type = "Service Unavailable"
    retryable = True


class DeadlineError(LockstepError):
    """The request did not finish in its time."""

    http_status = 504
    type = "Gateway Timeout"
    retryable = True


class InternalError(LockstepError):
    """Anything else; the cause is in the log only."""


def _tree(cls: type[LockstepError]) -> list[type[LockstepError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _tree(sub))]


ERROR_CLASSES: dict[str, type[LockstepError]] = {cls.__name__: cls for cls in _tree(LockstepError)}
"""By name, as `RequestError.code` carries it over the wire."""
