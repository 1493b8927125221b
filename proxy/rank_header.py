"""ASGI middleware that reads X-data-parallel-rank, the decode rank that a client asks for."""

from collections.abc import Callable
from contextvars import ContextVar

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMValidationError

HEADER = "X-data-parallel-rank"

requested_rank: ContextVar[int | None] = ContextVar("requested_rank", default=None)
"""The rank that the request at hand asked for; there is such a rank, though it may be away."""


class RankHeader:
    """Refuses what is no rank's number, and makes the number known to whatever the route generates.

    vLLM takes a value that is no number for no value (generate/base/serving.py::_get_data_parallel_rank), and
    of its routes only completions and chat read the header at all. It checks the range when it has begun to
    answer, which a stream of /v1/messages cannot report (anthropic/serving.py::message_stream_converter).
    """

    def __init__(self, app: ASGIApp, num_ranks: Callable[[], int]) -> None:
        self._app = app
        self._num_ranks = num_ranks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        value = Headers(scope=scope).get(HEADER) if scope["type"] == "http" else None
        if value is None:
            await self._app(scope, receive, send)
            return
        try:
            rank = self._rank(value)
        except VLLMValidationError as error:
            body = create_error_response(error).model_dump()
            await JSONResponse(body, status_code=400)(scope, receive, send)
            return
        reset = requested_rank.set(rank)
        try:
            await self._app(scope, receive, send)
        finally:
            requested_rank.reset(reset)

    def _rank(self, value: str) -> int:
        """Raises VLLMValidationError; for a number out of range with vLLM's text (input_processor.py:396)."""
        try:
            rank = int(value)
        except ValueError:
            raise VLLMValidationError(
                f"{HEADER} must be the number of a rank, got {value!r}.", parameter=HEADER
            ) from None
        num_ranks = self._num_ranks()
        if not 0 <= rank < num_ranks:
            raise VLLMValidationError(f"data_parallel_rank {rank} is out of range [0, {num_ranks}).")
        return rank
