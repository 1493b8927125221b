"""The vLLM code that carried tokens rely on is still as docs/vllm-surface.md says."""

import inspect
import re

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.request import StructuredOutputRequest
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def source(function: object) -> str:
    return inspect.getsource(function)  # type: ignore[arg-type]


def test_scheduler_methods() -> None:
    """Those that are overridden, and what the schedule loop asks first of a waiting request."""
    assert list(inspect.signature(Scheduler.add_request).parameters) == ["self", "request"]
    assert list(inspect.signature(Scheduler._handle_blocked_waiting_request).parameters) == [
        "self",
        "request",
    ]
    assert "ready_to_schedule = self._handle_blocked_waiting_request(request)" in source(Scheduler.schedule)


def test_request_takes_output_tokens_before_it_runs() -> None:
    """With block hashes and all; the schedule loop counts what is to be computed from all tokens."""
    assert "self.update_block_hashes()" in source(Request.append_output_token_ids)
    assert "num_new_tokens = request.num_tokens - num_computed_tokens" in source(Scheduler.schedule)
    assert "request.prefill_stats and request.num_preemptions <= 0" in source(Scheduler.schedule)


def test_prompt_logprobs_are_complete_with_the_prompt() -> None:
    """Why carried tokens and prompt_logprobs are refused together."""
    assert "assert not prompt_logprobs_tensors" in source(Scheduler.update_from_output)
    assert "num_prompt_tokens - start_tok" in source(GPUModelRunner._get_prompt_logprobs_dict)


def test_a_grammar_that_failed_ends_its_request() -> None:
    """The way by which a request that cannot continue is ended."""
    assert list(inspect.signature(StructuredOutputRequest).parameters)[:2] == ["params", "_grammar"]
    assert "isinstance(struct_output_req.grammar, Exception)" in source(
        Scheduler._handle_blocked_waiting_request
    )
    assert "error_req_ids = set(self.grammar_compile_error_reqs)" in source(Scheduler.update_from_output)


def test_accepting_tokens_reads_no_more_of_a_request() -> None:
    """`grammar._GeneratedSoFar` has what these methods read."""
    read: set[str] = set()
    for method in (
        StructuredOutputManager.accept_tokens,
        StructuredOutputManager._get_constraint_bounds,
        StructuredOutputManager._get_reasoner,
    ):
        read |= set(re.findall(r"\brequest\.(\w+)", source(method)))
    assert read == {
        "use_structured_output",
        "structured_output_request",
        "request_id",
        "prompt_token_ids",
        "all_token_ids",
    }


def test_runner_starts_a_new_request_without_output() -> None:
    """V1 gets no output tokens with a new request; it makes its state by keyword, with an empty list."""
    assert "output_token_ids=[]," in source(GPUModelRunner._update_states)
    assert "output_token_ids" not in NewRequestData.__dataclass_fields__


def test_push_scheduler_counts_the_prompt_only() -> None:
    """What our connector does differently, and the method that both use."""
    assert "len(token_ids)" in source(NixlPushConnectorScheduler.get_num_new_matched_tokens)
    parameters = inspect.signature(NixlBaseConnectorScheduler._get_remote_prefill_token_count).parameters
    assert list(parameters) == ["self", "num_prompt_tokens"]


def test_engine_core_only_calls_what_scheduler_cls_names() -> None:
    """So that it may be a function that chooses the class."""
    assert "Scheduler = vllm_config.scheduler_config.get_scheduler_cls()" in source(EngineCore.__init__)
    assert "self.scheduler: SchedulerInterface = Scheduler(\n" in source(EngineCore.__init__)
