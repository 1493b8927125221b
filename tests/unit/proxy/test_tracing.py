"""Where traces go, which is checked at start, and what the log says of a trace."""

import logging

import pytest
from unit.proxy.attempts_for_tests import OFFSET_S, flight, prefill_end, request

from lockstep.errors import ConfigError
from proxy import arguments, flight_log
from proxy.flight import Flight
from proxy.outlet import Outlet
from proxy.tracing import context

NODES = ("--prefill", "p:1", "--decode", "d:1")
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}


@pytest.mark.parametrize("value", ["collector", "grpc://collector", "http://", "a b:4317", "c:port"])
def test_an_endpoint_that_is_no_server_is_refused_by_flag(value: str) -> None:
    """vLLM's exporter would take it and send nothing; the message names the flag and a value that works."""
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint: .* give one such as http://"):
        arguments.load([*NODES, f"--otlp-traces-endpoint={value}"])


@pytest.mark.parametrize(
    "value", ["collector:4317", "grpc://10.0.0.1:4317", "http://c", "https://[::1]:4317"]
)
def test_an_endpoint_may_be_written_as_for_vllm(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any scheme or none."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    _, args = arguments.load([*NODES, "--otlp-traces-endpoint", value])
    assert args.otlp_traces_endpoint == value


def test_a_protocol_without_an_exporter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would say so only once the nodes are there."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: 'http/json' is none of grpc"):
        arguments.load([*NODES, "--otlp-traces-endpoint", "collector:4317"])


@pytest.mark.parametrize(
    ("headers", "trace_id"),
    [(HEADERS, TRACE_ID), (None, ""), ({}, ""), ({"traceparent": "junk"}, "")],
)
def test_trace_of_headers(headers: dict[str, str] | None, trace_id: str) -> None:
    """The second part of a traceparent."""
    assert context.trace_id(headers) == trace_id


def test_log_line_names_the_trace(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its end, and only where the request is traced: one looks a slow request's spans up by it."""
    monkeypatch.setattr(logging.getLogger("proxy"), "propagate", True)
    traced, plain = (Flight(id_, request(id_), f"ls-0-{id_}", 2, Outlet()) for id_ in ("a", "b"))
    traced.request.trace_headers = HEADERS
    with caplog.at_level(logging.INFO, "proxy.flight_log"):
        flight_log.ended(traced, "stop")
        flight_log.ended(plain, "stop")
    first, second = (record.getMessage() for record in caplog.records)
    assert first.endswith(f" trace={TRACE_ID}")
    assert "trace" not in second


def test_output_has_the_requests_own_parent() -> None:
    """Nodes answer with the leg's; vLLM's span would be below one of the legs."""
    made = flight(hand_off=True)
    made.request.trace_headers = HEADERS
    output = prefill_end()
    output.trace_headers = {"traceparent": "the leg's"}
    (first,) = made.on_output("prefill", output, OFFSET_S)
    assert first.trace_headers == HEADERS
