"""vLLM's AsyncLLM over our engine-core client: the seam where its front end meets the cluster."""

import contextlib
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMError
from vllm.outputs import RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import async_llm
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from lockstep.errors import DrainingError, InvalidRequestError, LockstepError
from proxy import http_errors, plain_events, refusals
from proxy.admission.admit import admit
from proxy.engine_core_client import ClusterClient
from proxy.first_byte import failure
from proxy.legs import KV_TRANSFER_PARAMS
from proxy.rank_header import requested_rank
from proxy.security.headers import check_request_id


class FrontEnd(AsyncLLM):
    """Starts no engine and loads no weights.

    vLLM's metrics are those of the last instance of a process (v1/metrics/loggers.py, PrometheusStatLogger).
    """

    def __init__(self, vllm_config: VllmConfig, client: ClusterClient, args: Any) -> None:
        self._client = client
        plain_events.install()
        with _engine_core_client(client):
            super().__init__(
                vllm_config=vllm_config,
                executor_class=None,
                log_stats=not args.disable_log_stats,
                log_requests=args.enable_log_requests,
            )
        client.outlet.fail_request = self._fail_request

    async def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams | PoolingParams, **kwargs: Any
    ) -> RequestOutputCollector:
        """Refuse here what must not reach the cluster; nothing is registered for the request yet."""
        try:
            check_request_id(request_id)
            refusals.check(prompt, params, kwargs.get("lora_request"))
            self._refuse(params)
            kwargs["priority"] = admit(self._client.flow, params, kwargs.get("priority", 0))
        except LockstepError as error:
            raise http_errors.to_front_end(error, request_id) from error
        if kwargs.get("data_parallel_rank") is None:
            kwargs["data_parallel_rank"] = requested_rank.get()
        if kwargs["data_parallel_rank"] is not None:
            # vLLM checks the number against this (input_processor.py:392); the ranks come and go.
            self.vllm_config.parallel_config.data_parallel_size = max(1, self._client.flow.num_decode_ranks)
        return await super().add_request(request_id, prompt, params, **kwargs)

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        """Keep the error that a request ends with for the gate: not all of vLLM's streams pass it on."""
        async with contextlib.aclosing(super().generate(*args, **kwargs)) as outputs:
            try:
                async for output in outputs:
                    yield output
            except VLLMError as error:
                failure.get().body = http_errors.body(error)
                raise

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Called for a client that left; a stop string's abort does not come through here."""
        with self._client.ending_as("disconnected"):
            await super().abort(request_id, internal)

    async def check_health(self) -> None:
        """/health answers 503 to this error (serve/instrumentator/health.py), and to no other."""
        if self._client.flow.not_ready_because():
            raise EngineDeadError()
        await super().check_health()

    def _refuse(self, params: SamplingParams | PoolingParams) -> None:
        """The hand-off between nodes is ours: a client could otherwise point a node at any address.

        Chosen ids' logprobs end vLLM's engine when it speculates: its rejection sampler asks for whole rows
        of logits and gets these ids' only (v1/sample/rejection_sampler.py:235 of 0.32, on any device).
        """
        if isinstance(params, SamplingParams):
            if KV_TRANSFER_PARAMS in (params.extra_args or {}):
                raise InvalidRequestError(
                    f"{KV_TRANSFER_PARAMS} is not accepted from clients.", KV_TRANSFER_PARAMS
                )
            if params.logprob_token_ids and self.vllm_config.speculative_config is not None:
                raise InvalidRequestError(
                    "logprob_token_ids is not supported with speculative decoding.", "logprob_token_ids"
                )
        if self._client.flow.draining:
            raise DrainingError("The service is shutting down.")

    def _fail_request(self, front_id: str, error: LockstepError) -> list[str]:
        """Put the error into the request's output queue and drop it, all of its choices, from vLLM's books.

        generate() passes such an error through without an abort (async_llm.py:806), so that is done here; the
        final output that the abort makes does not replace the error (output_processor.py::put).
        """
        state = self.output_processor.request_states.get(front_id)
        if state is None or state.queue is None:
            return []
        state.queue.put(http_errors.to_front_end(error, state.external_req_id))
        dropped: list[str] = self.output_processor.abort_requests([state.queue.request_id], internal=True)
        return dropped


@contextlib.contextmanager
def _engine_core_client(client: ClusterClient) -> Iterator[None]:
    """While AsyncLLM is constructed, its factory for a client of new engine processes gives ours."""

    class Factory:
        @staticmethod
        def make_async_mp_client(**_: Any) -> ClusterClient:
            return client

    original = async_llm.EngineCoreClient
    async_llm.EngineCoreClient = Factory
    try:
        yield
    finally:
        async_llm.EngineCoreClient = original
