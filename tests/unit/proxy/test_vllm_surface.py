"""What the proxy relies on inside vLLM; each row of docs/vllm-surface.md for the proxy has its test here."""

import ast
import dataclasses
import inspect
import json
import textwrap
from typing import Any

import pytest
from fastapi import FastAPI
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.anthropic.api_router import translate_error_response
from vllm.entrypoints.anthropic.serving import wrap_data_with_event
from vllm.entrypoints.generate.base.serving import PRIORITY_HEADER, GenerateBaseServing
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import NoSignalServer, validate_api_server_args
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers import vllm_error
from vllm.entrypoints.serve.instrumentator import health
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    async_llm,
)
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector, RequestState
from vllm.v1.metrics.stats import IterationStats, LoRARequestStates, PrefillStats, RequestStateStats
from vllm.v1.sample.rejection_sampler import RejectionSampler

from proxy.admission.config import AdmissionConfig
from proxy.engine_core_client import ClusterClient
from proxy.rank_header import HEADER
from proxy.security.key_source import take

SERVING_METHODS = {
    "get_supported_tasks_async",
    "add_request_async",
    "abort_requests_async",
    "get_output_async",
    "shutdown",
}
"""What serving calls on the client. The rest of EngineCoreClient is administration, and not implemented."""


FLAGS = (
    "host",
    "port",
    "model",
    "model_tag",
    "tokenizer",
    "revision",
    "dtype",
    "trust_remote_code",
    "generation_config",
    "max_model_len",
    "speculative_config",
    "kv_transfer_config",
    "headless",
    "api_server_count",
    "uds",
    "served_model_name",
    "tool_parser_plugin",
    "reasoning_parser_plugin",
    "disable_log_stats",
    "enable_log_requests",
    "uvicorn_log_level",
    "disable_uvicorn_access_log",
    "ssl_keyfile",
    "ssl_certfile",
    "ssl_ca_certs",
    "ssl_cert_reqs",
    "ssl_ciphers",
    "h11_max_incomplete_event_size",
)
"""Arguments that arguments.py, vllm_config.py and server.py read or refuse."""


def source(of: Any) -> str:
    return textwrap.dedent(inspect.getsource(of))


def handlers(function: Any) -> dict[str, str]:
    """The except clauses of a function: what they catch, and their body."""
    tree = ast.parse(source(function))
    return {
        ast.unparse(node.type): ast.unparse(ast.Module(node.body, []))
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and node.type is not None
    }


def test_async_llm_makes_its_client_by_the_name_that_is_replaced() -> None:
    """front_end.py replaces async_llm.EngineCoreClient; the factory is called once and by keywords."""
    assert async_llm.EngineCoreClient is EngineCoreClient
    calls = [
        node
        for node in ast.walk(ast.parse(source(AsyncLLM.__init__)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "EngineCoreClient.make_async_mp_client"
    ]
    assert len(calls) == 1
    assert not calls[0].args


def test_client_has_all_that_serving_calls() -> None:
    """Serving methods are ours and have vLLM's signatures; no other is abstract."""
    assert EngineCoreClient.__abstractmethods__ == {"shutdown"}
    for name in SERVING_METHODS:
        ours, theirs = getattr(ClusterClient, name), getattr(EngineCoreClient, name, None)
        assert ours is not theirs, name
        if theirs is not None:
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters) or (
                name == "add_request_async"
            )


def test_async_llm_reads_nothing_else_of_the_client_while_serving() -> None:
    """In construction, the output loop, the request path and the health check."""
    serving = (
        AsyncLLM.__init__,
        AsyncLLM._run_output_handler,
        AsyncLLM.add_request,
        AsyncLLM._add_request,
        AsyncLLM.abort,
        AsyncLLM.get_supported_tasks,
        AsyncLLM.check_health,
        AsyncLLM.shutdown,
        AsyncLLM.errored.fget,
    )
    used = {
        node.attr
        for function in serving
        for node in ast.walk(ast.parse(source(function)))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self.engine_core", "engine_core")
    }
    assert used == SERVING_METHODS | {"engine_ranks_managed", "resources"}


def test_generate_passes_our_errors_through_without_abort() -> None:
    """http_errors.py makes only these two classes, and front_end.py does the abort."""
    caught = handlers(AsyncLLM.generate)
    body = caught["(VLLMClientError, GracefulHTTPError)"]
    assert body.endswith("raise")
    assert "abort" not in body
    assert "raise EngineGenerateError() from e" in source(AsyncLLM.generate)


def test_add_request_takes_the_rank_by_keyword() -> None:
    """front_end.py reads it from the keywords that generate() passes on."""
    parameters = inspect.signature(AsyncLLM.add_request).parameters
    assert list(parameters)[:4] == ["self", "request_id", "prompt", "params"]
    assert "data_parallel_rank=data_parallel_rank" in source(AsyncLLM.generate)


def test_rank_number_is_checked_against_the_parallel_config() -> None:
    """front_end.py sets data_parallel_size to the number of decode ranks before each such check."""
    text = source(InputProcessor.process_inputs)
    assert "dp_size = parallel_config.data_parallel_size" in text
    assert "self.vllm_config.parallel_config" in text


async def test_queue_keeps_an_error_over_the_output_of_the_abort() -> None:
    """front_end.py puts the error first and then lets vLLM abort, which puts a final output."""
    queue = RequestOutputCollector(RequestOutputKind.DELTA, "id")
    queue.put(ValueError("kept"))
    queue.put(RequestOutput("id", None, None, None, [], finished=True))
    with pytest.raises(ValueError, match="kept"):
        await queue.get()
    assert queue.request_id == "id"


def test_output_processor_has_the_books_that_are_kept_clean() -> None:
    """States by internal id with their queue and the client's id, and an abort by internal id."""
    processor = OutputProcessor(None, log_stats=False)
    assert processor.request_states == {}
    assert list(inspect.signature(processor.abort_requests).parameters) == ["request_ids", "internal"]
    parameters = inspect.signature(RequestState.__init__).parameters
    assert {"queue", "external_req_id"} <= set(parameters)


def test_structs_have_the_fields_that_are_set() -> None:
    """legs.py, flight.py and attempt.py read or rewrite these."""
    assert {"request_id", "sampling_params", "external_req_id", "data_parallel_rank", "prompt_embeds"} <= set(
        EngineCoreRequest.__struct_fields__
    )
    assert {
        "request_id",
        "new_token_ids",
        "finish_reason",
        "stop_reason",
        "events",
        "kv_transfer_params",
        "prefill_stats",
        "new_prompt_logprobs_tensors",
        "prompt_token_id_logprobs",
    } <= set(EngineCoreOutput.__struct_fields__)
    assert {"outputs", "timestamp", "weight_version", "engine_index", "scheduler_stats"} <= set(
        EngineCoreOutputs.__struct_fields__
    )
    assert {
        "_eos_token_id",
        "skip_reading_prefix_cache",
        "output_text_buffer_length",
        "repetition_detection",
        "prompt_logprob_token_ids",
        "prompt_logprob_start",
        "logprob_token_ids",
    } <= set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("prefilling", [True, False])
def test_preemption_is_an_event_and_prefill_counts_once(prefilling: bool) -> None:
    """flight.py gives the event with the next attempt's first output, and drops that one's prefill stats."""
    stats, request = IterationStats(), RequestStateStats(queued_ts=1.0, scheduled_ts=2.0)
    events = [EngineCoreEvent(EngineCoreEventType.PREEMPTED, 3.0)]
    output = EngineCoreOutput("a", [1], events=events, prefill_stats=PrefillStats(5, 5))
    stats.update_from_output(output, 4.0, prefilling, request, LoRARequestStates(), None)
    assert (stats.num_preempted_reqs, request.num_preemptions) == (1, 1)
    assert (request.queued_ts, request.scheduled_ts) == (1.0, 2.0)
    assert stats.num_prompt_tokens == (5 if prefilling else 0)


def test_tokens_after_a_stop_string_are_cut_in_place() -> None:
    """flight.py keeps what was passed on, whatever the front end does with its list."""
    assert "del output.new_token_ids[num_kept:]" in source(OutputProcessor._trim_surplus_tokens)


def test_app_is_built_from_the_launchers() -> None:
    """server.py builds vLLM's app with its own arguments."""
    assert list(inspect.signature(build_app).parameters) == ["args", "supported_tasks", "model_config"]
    assert list(inspect.signature(init_app_state).parameters) == [
        "engine_client",
        "state",
        "args",
        "supported_tasks",
    ]
    assert "config" in inspect.signature(NoSignalServer).parameters
    assert callable(validate_api_server_args)
    assert callable(validate_parsed_serve_args)
    assert list(inspect.signature(get_uvicorn_log_config).parameters) == ["args"]


def test_middleware_can_be_added_after_the_app_is_built() -> None:
    """server.py appends to Starlette's list and lets it build the stack again."""
    app = FastAPI()
    assert app.user_middleware == []
    assert "if self.middleware_stack is None" in inspect.getsource(app.__class__.__mro__[1].__call__)


def test_health_answers_503_to_a_dead_engine_only() -> None:
    """front_end.py raises that error while no pair is ready."""
    caught = handlers(health.health)
    assert list(caught) == ["EngineDeadError"]
    assert "503" in caught["EngineDeadError"]


def test_error_event_begins_as_the_gate_expects() -> None:
    """first_byte.py recognises vLLM's error event by its first bytes and its code."""
    text = GenerateBaseServing.create_streaming_error_response(
        GenerateBaseServing.__new__(GenerateBaseServing), ValueError("x")
    )
    assert f"data: {text}".startswith('data: {"error"')
    assert json.loads(text)["error"]["code"] == 400


def test_responses_stream_opens_before_there_is_a_token() -> None:
    """first_byte.py holds these two events back; the next one needs a token."""
    source = inspect.getsource(OpenAIServingResponses.responses_stream_generator)
    assert source.index("ResponseCreatedEvent(") < source.index("ResponseInProgressEvent(")
    assert source.index("ResponseInProgressEvent(") < source.index("async for event_data in processor(")


def test_messages_have_an_error_shape_of_their_own() -> None:
    """first_byte.py writes it as vLLM translates it, and recognises the event by its first line."""
    response = create_error_response("m")
    body = json.loads(translate_error_response(response).body)
    assert body == {"type": "error", "error": {"type": "BadRequestError", "message": "m"}}
    assert wrap_data_with_event("{}", "error").startswith("event: error\n")


def test_chosen_ids_logprobs_and_bonus_logits_still_collide() -> None:
    """front_end.py refuses them; when the sampler no longer asks for whole rows, the refusal may go."""
    source = inspect.getsource(RejectionSampler)
    assert "max_num_logprobs=-1" in source
    assert "logprob_token_ids" not in source


def test_rank_header_is_ignored_when_it_is_no_number() -> None:
    """rank_header.py reads the same header and refuses such a value."""
    source = inspect.getsource(GenerateBaseServing._get_data_parallel_rank)
    assert f'"{HEADER}"' in source
    assert "except ValueError:\n            return None" in source


def test_front_end_flags_that_are_read_or_owned() -> None:
    """By the names of vLLM's parser."""
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    for name in FLAGS:
        assert hasattr(args, name), name


def test_engine_args_make_a_config_without_an_engine() -> None:
    """vllm_config.py follows launchers/render/entry.py, plus the speculative configuration."""
    for name in (
        "create_model_config",
        "create_speculative_config",
        "create_logging_config",
        "create_structured_outputs_config",
    ):
        assert callable(getattr(AsyncEngineArgs, name))
    assert {"model", "tokenizer", "speculative_config"} <= {
        f.name for f in dataclasses.fields(AsyncEngineArgs)
    }


def test_error_handler_reads_the_server_from_the_app() -> None:
    """succession.py puts it there, which vLLM's launcher does for the one app that it starts."""
    assert "server=req.app.state.server" in inspect.getsource(vllm_error)


def test_vllm_asks_for_no_key_once_its_own_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its check knows no other keys than these, so it has to stay out where ours are asked for."""
    monkeypatch.setenv("VLLM_API_KEY", "of the variable")
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--api-key", "of the flag"])
    assert "AuthenticationMiddleware" in _middleware(args)
    take(AdmissionConfig(), args)
    assert "AuthenticationMiddleware" not in _middleware(args)


def _middleware(args: Any) -> list[str]:
    app = build_app(args, ("generate",), None)
    return [middleware.cls.__name__ for middleware in app.user_middleware]


def test_priority_comes_by_header_and_keyword() -> None:
    """The header goes before the field; both reach the front end as a keyword that it may change."""
    assert PRIORITY_HEADER == "X-Vllm-Priority"
    assert inspect.signature(AsyncLLM.add_request).parameters["priority"].default == 0
    assert "priority=priority" in inspect.getsource(AsyncLLM.generate)


def test_spans_have_their_parent_from_the_outputs_headers() -> None:
    """The front end sets the exporter up and hands the client's context on; its span asks the last output."""
    assert "init_tracer(" in inspect.getsource(AsyncLLM.__init__)
    assert "trace_headers" in inspect.signature(AsyncLLM.add_request).parameters
    assert "extract_trace_context(engine_core_output.trace_headers)" in inspect.getsource(
        OutputProcessor.do_tracing
    )
    assert {"trace_headers"} <= set(EngineCoreRequest.__struct_fields__) & set(
        EngineCoreOutput.__struct_fields__
    )


def test_engine_core_that_is_stopped_aborts_without_a_stop_reason() -> None:
    """By that such an end is told from a bounce."""
    assert "self._send_abort_outputs(aborted_reqs)" in source(EngineCoreProc._handle_shutdown)
    assert "FinishReason.ABORT" in source(EngineCoreProc._send_abort_outputs_to_client)
    assert "stop_reason" not in source(EngineCoreProc._send_finish_outputs_to_client)
