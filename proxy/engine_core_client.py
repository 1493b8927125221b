"""The engine-core client that vLLM's front end drives: to it, the whole cluster is one engine."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient

from proxy import legs
from proxy.admission.accounts import current_account
from proxy.flight import Flight
from proxy.flow import Flow
from proxy.ids import ChoiceIds
from proxy.outlet import Outlet
from proxy.session_header import session


@dataclass(slots=True)
class _Resources:
    """vLLM reads this to see whether its engine died; a cluster does not, its nodes come back."""

    engine_dead: bool = False


class ClusterClient(EngineCoreClient):
    """Hands requests to the flow and its outputs back.

    Administrative calls (sleep, LoRA, profiling, ...) stay vLLM's NotImplementedError: clients see a 501.
    """

    def __init__(self, flow: Flow, ids: ChoiceIds) -> None:
        self.flow = flow
        self.outlet = Outlet()
        self.resources = _Resources()
        self.engine_ranks_managed = [0]
        self._ids = ids
        self._abort_outcome = "stop string"

    def for_another(self) -> "ClusterClient":
        """A client for another front end over the same nodes."""
        return ClusterClient(self.flow, self._ids)

    async def get_supported_tasks_async(self) -> tuple[SupportedTask, ...]:
        return ("generate",)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Start a request; errors reach it through its own output, never as an exception here.

        An exception would leave the request behind in vLLM's output processor (async_llm.py::_add_request).
        """
        prompt_tokens = legs.prompt_tokens(request)
        flight = Flight(request.request_id, request, self._ids.new(), prompt_tokens, self.outlet)
        flight.account = current_account.get()
        flight.session = session.get()
        self.flow.start(flight)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Called for a stop string that the detokenizer found, and within `ending_as` for other ends."""
        self.flow.abort(request_ids, self._abort_outcome)

    @contextlib.contextmanager
    def ending_as(self, outcome: str) -> Iterator[None]:
        """Name what aborts in here mean in the log; nothing in here waits, so nobody else gets the name."""
        previous, self._abort_outcome = self._abort_outcome, outcome
        try:
            yield
        finally:
            self._abort_outcome = previous

    async def get_output_async(self) -> EngineCoreOutputs:
        """Never raises for one request: vLLM would fail all of them (async_llm.py::output_handler)."""
        return await self.outlet.outputs.get()

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing to do: the sessions belong to the server, which closes them."""
