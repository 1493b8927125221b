"""Tells the first tokens of a step as soon as they are sampled; runs inside the engine core.

vLLM gives out what a step sampled once the whole step is done, and that ends with the drafter's passes. On
prefill the client's first token would wait for drafts that only decode needs.
"""

from collections import defaultdict
from collections.abc import Callable
from copy import copy
from typing import Any

from vllm import envs
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs


class FirstTokens:
    """One engine core's. `core` is vLLM's `EngineCoreProc`.

    What is told so is told again by the step's own outputs, with the end of the leg and all else.
    """

    def __init__(self, core: Any) -> None:
        self._core = core

    def begin(self, request_ids: list[str]) -> Callable[[list[int]], None]:
        """Called within the step; what it returns takes their tokens, on any thread."""
        known = [(i, self._core.scheduler.requests.get(rid)) for i, rid in enumerate(request_ids)]
        told = [
            (i, request.client_index, self._output(request)) for i, request in known if self._is_all(request)
        ]

        def tell(token_ids: list[int]) -> None:
            by_client: dict[int, list[EngineCoreOutput]] = defaultdict(list)
            for i, client_index, output in told:
                output.new_token_ids.append(token_ids[i])
                by_client[client_index].append(output)
            outputs = {client: EngineCoreOutputs(outputs=mine) for client, mine in by_client.items()}
            self._core._attach_weight_version(outputs)
            for item in outputs.items():
                self._core.output_queue.put_nowait(item)

        return tell

    def _is_all(self, request: Any) -> bool:
        """Whether the client's first output has nothing beside the token that only the whole step gives."""
        if request is None or request.sampling_params is None:
            return False
        scheduler, params = self._core.scheduler, request.sampling_params
        return (
            params.num_logprobs is None
            and params.prompt_logprobs is None
            and params.prompt_logprob_token_ids is None
            and scheduler.aux_output_connector is None
            and not scheduler.return_sampling_mask
            and not envs.VLLM_COMPUTE_NANS_IN_LOGITS
        )

    def _output(self, request: Any) -> EngineCoreOutput:
        """Without its token. The request keeps its events and statistics for the step's own output."""
        stats = copy(request.prefill_stats)
        if stats is not None:
            stats.finalize(self._core.scheduler.kv_cache_manager.estimate_cached_tokens(request))
        return EngineCoreOutput(request.request_id, [], events=list(request.events), prefill_stats=stats)
