"""vLLM's --otlp-traces-endpoint on the proxy: its check at start, and the name that traces go by."""

import os
from argparse import Namespace
from urllib.parse import urlsplit

from vllm.tracing import is_tracing_available, otel_import_error_traceback

from lockstep.errors import ConfigError

FLAG = "--otlp-traces-endpoint"
_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_PROTOCOLS = ("grpc", "http/protobuf")
"""What vLLM has an exporter for (tracing/otel.py::get_span_exporter)."""


def prepare(args: Namespace) -> None:
    """Raises ConfigError for what vLLM would accept and then send nothing to, or fail at only later.

    The exporter itself is vLLM's, made when the front end is (v1/engine/async_llm.py, `init_tracer`).
    """
    endpoint: str | None = args.otlp_traces_endpoint
    if endpoint is None:
        if args.collect_detailed_traces:
            raise ConfigError(f"--collect-detailed-traces needs {FLAG}; give it too")
        return
    if not is_tracing_available():
        raise ConfigError(
            f"{FLAG}: the opentelemetry packages cannot be imported: {otel_import_error_traceback}"
        )
    protocol = os.environ.get(_PROTOCOL, "grpc")
    if protocol not in _PROTOCOLS:
        raise ConfigError(f"{_PROTOCOL}: {protocol!r} is none of {', '.join(_PROTOCOLS)}")
    if not _names_a_server(endpoint, with_scheme=protocol != "grpc"):
        example = "http://collector:4317" if protocol == "grpc" else "http://collector:4318/v1/traces"
        raise ConfigError(f"{FLAG}: {endpoint!r} is no address of a collector; give one such as {example}")
    # Where OTEL_SERVICE_NAME says nothing, traces would come from "unknown_service".
    os.environ.setdefault("OTEL_SERVICE_NAME", "lockstep-proxy")


def _names_a_server(endpoint: str, *, with_scheme: bool) -> bool:
    if "://" not in endpoint and not with_scheme:
        endpoint = f"grpc://{endpoint}"
    try:
        parts = urlsplit(endpoint)
        named = bool(parts.hostname) and (parts.port is not None or parts.scheme in ("http", "https"))
    except ValueError:
        return False
    return named and not any(character.isspace() for character in endpoint)
