"""Refuses gRPC calls that do not show the token, on the server's side."""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio

from lockstep.rpc.credentials import TOKEN_METADATA, Credentials

logger = logging.getLogger(__name__)

_OPEN_PREFIX = "/grpc.health.v1.Health/"
"""Whether a service is up is no secret, and the probes of orchestrators show no token."""

_LOG_INTERVAL_S = 10.0
"""Whoever tries tokens fills no log."""


class TokenCheck(grpc.aio.ServerInterceptor):
    """Sees each call once, at its start: nothing is added to the messages of a session."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._logged_s = -_LOG_INTERVAL_S

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """The method itself, or one of the same kind that refuses."""
        handler = await continuation(details)
        if handler is None or details.method.startswith(_OPEN_PREFIX):
            return handler
        shown = next((value for name, value in details.invocation_metadata if name == TOKEN_METADATA), None)
        if self._credentials.accepts(shown if isinstance(shown, str) else None):
            return handler
        return self._refusing(handler)

    def _refusing(self, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
            now = time.monotonic()
            if now - self._logged_s >= _LOG_INTERVAL_S:
                self._logged_s = now
                logger.warning("refused a call from %s: no token, or another one", context.peer())
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or is another one")

        async def refuse_stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            await refuse(request, context)
            yield None  # never reached: abort raises

        kinds = {
            (False, False): (grpc.unary_unary_rpc_method_handler, refuse),
            (False, True): (grpc.unary_stream_rpc_method_handler, refuse_stream),
            (True, False): (grpc.stream_unary_rpc_method_handler, refuse),
            (True, True): (grpc.stream_stream_rpc_method_handler, refuse_stream),
        }
        make, behaviour = kinds[handler.request_streaming, handler.response_streaming]
        refusing: grpc.RpcMethodHandler = make(
            behaviour, handler.request_deserializer, handler.response_serializer
        )
        return refusing
