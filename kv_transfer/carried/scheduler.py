"""The scheduler's part of carried tokens: a request is added with them as output tokens, or refused."""

from typing import Any

from vllm.v1.request import RequestStatus

from kv_transfer.carried import grammar
from kv_transfer.params import carried_output_token_ids


class CarriedOutputScheduler:
    """Put before vLLM's `Scheduler` or `AsyncScheduler` in the MRO.

    To the scheduler such a request is like one that was preempted (it has output tokens and no KV), except
    that the worker does not know it yet: `runner.py` gives it the tokens. Penalties, min_tokens, max_tokens,
    bad_words and usage then count them as output.
    """

    max_model_len: int
    vllm_config: Any
    structured_output_manager: Any

    def add_request(self, request: Any) -> None:
        """As vLLM's, with the carried tokens appended first, so that block hashes and connector see them.

        A request that cannot continue fails with FINISHED_ERROR in the next step; the reason is logged.
        """
        try:
            carried = carried_output_token_ids(request.kv_transfer_params)
            self._check_carried(request, carried)
        except ValueError as error:
            grammar.fail(request, str(error))
        else:
            if carried:
                request.append_output_token_ids(carried)
                # They were given out by the first attempt, and vLLM asserts that no more than the prompt is
                # found computed while there are any (v1/core/sched/scheduler.py:1076).
                request.prefill_stats = None
        super().add_request(request)  # type: ignore[misc]

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """As vLLM's (v1/core/sched/scheduler.py:3175); a grammar that became ready is brought up to date."""
        waits_for_grammar = request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        if waits_for_grammar and request.num_output_tokens:
            grammar.replay(self.structured_output_manager, request)
        return bool(super()._handle_blocked_waiting_request(request))  # type: ignore[misc]

    def _check_carried(self, request: Any, carried: list[int]) -> None:
        """Raises ValueError for tokens that a worker could not take or that leave nothing to generate."""
        if not carried:
            return
        if request.sampling_params.prompt_logprobs is not None:
            # A chunk that ends among the carried tokens would complete them where vLLM asserts that no
            # output is returned (v1/core/sched/scheduler.py:2284).
            raise ValueError("prompt_logprobs belong to the first attempt")
        if len(carried) >= request.max_tokens:
            raise ValueError(f"{len(carried)} carried tokens leave none of max_tokens {request.max_tokens}")
        if request.num_tokens + len(carried) >= self.max_model_len:
            raise ValueError(
                f"{request.num_tokens} prompt and {len(carried)} carried tokens leave no room below "
                f"--max-model-len {self.max_model_len}"
            )
        if max(carried) >= self.vllm_config.model_config.get_vocab_size():
            raise ValueError(f"carried token {max(carried)} is not in the vocabulary")
