"""The vLLM code that the hand-off relies on is still as docs/vllm-surface.md says."""

import inspect
import re

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin


def source(function: object) -> str:
    return inspect.getsource(function)  # type: ignore[arg-type]


def test_runner_samples_before_it_drafts() -> None:
    """`_sample` gives the tokens; the drafts stay with the runner; the save comes last."""
    parameters = list(inspect.signature(GPUModelRunner._sample).parameters)
    assert parameters == ["self", "logits", "spec_decode_metadata"]
    assert "_sample" not in vars(CPUModelRunner)
    assert list(inspect.signature(GPUModelRunner.sample_tokens).parameters) == ["self", "grammar_output"]
    body = source(GPUModelRunner.sample_tokens)
    places = [
        body.index(text)
        for text in (
            "sampler_output = self._sample(logits, spec_decode_metadata)",
            "self._draft_token_ids = None",
            "self._draft_token_ids = self.propose_draft_token_ids(",
            "self.finalize_kv_connector()",
        )
    ]
    assert places == sorted(places)


def test_runner_finds_rows_and_the_connectors_worker() -> None:
    """By request id, and by the name that every connector over NIXL has."""
    assert "self.req_id_to_index: dict[str, int] = {}" in source(InputBatch.__init__)
    assert "self.connector_worker: " in source(NixlBaseConnector.__init__)


def test_what_a_step_gives_out_beside_its_tokens() -> None:
    """A first token that is told within the step has all of it that a client's first output can have."""
    update = source(Scheduler.update_from_output)
    output = update[update.index("                    EngineCoreOutput(") :]
    given = set(re.findall(r"^ {24}(\w+)=", output[: output.index("else:")], re.MULTILINE))
    told = {"request_id", "new_token_ids", "events", "prefill_stats"}
    at_an_end = {"finish_reason", "stop_reason", "spec_decode_metrics", "kv_transfer_params"}
    where_asked_for = {
        "new_logprobs",
        "new_sampling_mask",
        "new_prompt_logprobs_tensors",
        "prompt_token_id_logprobs",
        "routed_experts",
        "num_nans_in_logits",
    }
    left_out = {"trace_headers", "pooling_output", "ec_transfer_params"}  # the proxy's own; not served
    assert given == told | at_an_end | where_asked_for | left_out
    assert "self.aux_output_connector.take_output(" in update
    assert "if self.return_sampling_mask:" in update
    assert "if envs.VLLM_COMPUTE_NANS_IN_LOGITS:" in source(GPUModelRunner._bookkeeping_sync)
    assert "self.kv_cache_manager.estimate_cached_tokens(request)" in update
    assert "outputs[request.client_index].append(" in update
    assert "self.output_queue.put_nowait(output)" in source(EngineCoreProc._process_engine_step)
    assert "eco.weight_version = self._weight_version" in source(EngineCore._attach_weight_version)


def test_without_a_drafter_the_runner_saves_before_it_samples() -> None:
    """So the last chunk waits for the token (kv_transfer/worker.py `wait_for_save`)."""
    assert "if spec_config is not None:\n            self.finalize_kv_connector()" in source(
        GPUModelRunner.sample_tokens
    )
    assert "defer_finalize=" in source(GPUModelRunner.execute_model)


def test_worker_metadata_is_taken_after_the_results_and_read_before_them() -> None:
    """A payload never comes later than the receive that it belongs to."""
    body = source(KVConnectorModelRunnerMixin._get_kv_connector_output)
    assert body.index("get_transfer_results(") < body.index("build_connector_worker_meta()")
    update = source(Scheduler._update_from_kv_xfer_finished)
    assert update.index("update_connector_output(") < update.index("finished_recving_kv_req_ids.add(")
    assert "kv_connector_worker_meta" in KVConnectorOutput.__dataclass_fields__
    assert list(inspect.signature(KVConnectorWorkerMetadata.aggregate).parameters) == ["self", "other"]


def test_a_loaded_request_is_promoted_in_one_method() -> None:
    """It takes a token back only where all of them are computed."""
    assert "self._update_waiting_for_remote_kv(request)" in source(Scheduler._handle_blocked_waiting_request)
    body = source(Scheduler._update_waiting_for_remote_kv)
    assert "elif request.num_computed_tokens == request.num_tokens:" in body
    assert "request.request_id in self.failed_recving_kv_req_ids" in body


def test_drafts_of_a_first_row_reach_the_model_as_scheduled() -> None:
    """The asynchronous scheduler reads their number, and the runner replaces those of later rows."""
    assert "len(spec_decode_tokens.get(req_id, ()))" in source(AsyncScheduler._update_after_schedule)
    assert "token_ids_cpu" in source(InputBatch.update_req_spec_token_ids)
    schedule = source(Scheduler.schedule)
    assert schedule.index("scheduler_output = SchedulerOutput(") < schedule.index(
        "self._update_after_schedule(scheduler_output)"
    )
    step = source(EngineCore.step)
    assert step.index("self.scheduler.schedule(") < step.index("get_grammar_bitmask(scheduler_output)")


def test_one_rule_ends_a_request_after_a_token() -> None:
    """The proxy asks it about prefill's token, with what it reads here (proxy/hand_off.py `_Answer`)."""
    assert list(inspect.signature(check_stop).parameters) == ["request", "max_model_len"]
    read = {
        part.split("(")[0].split(")")[0]
        for part in source(check_stop).replace("\n", " ").split("request.")[1:]
    }
    names = {"".join(c for c in name.split(" ")[0] if c.isidentifier()) for name in read}
    assert {name.rstrip("[-1]:,") for name in names} <= {
        "pooling_params",
        "sampling_params",
        "output_token_ids",
        "status",
        "stop_reason",
        "num_tokens",
        "num_output_tokens",
        "max_tokens",
    }


def test_grammar_says_which_drafts_it_allows() -> None:
    """The longest valid prefix; and whether it allows a token that is taken."""
    assert list(inspect.signature(StructuredOutputManager.validate_tokens).parameters) == [
        "self",
        "request",
        "spec_tokens",
    ]
    assert list(inspect.signature(StructuredOutputManager.accept_tokens).parameters) == [
        "self",
        "request",
        "new_token_ids",
    ]
