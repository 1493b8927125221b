"""A collector of traces over the wire: OTLP's own gRPC service, which keeps what it is sent.

It has threads of its own: OpenTelemetry has one provider a process, which outlives the loop of a test.
"""

from concurrent import futures

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on a free port of this machine."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=1))

    def start(self) -> "OtlpReceiver":
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        return self

    def stop(self) -> None:
        self._server.stop(grace=None).wait()

    def Export(  # noqa: N802 - the protocol's name
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            self.services |= {
                item.value.string_value for item in resource.resource.attributes if item.key == "service.name"
            }
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def of(self, trace_id: str) -> list[Span]:
        """Those of one trace, by their beginning."""
        mine = [span for span in self.spans if span.trace_id.hex() == trace_id]
        return sorted(mine, key=lambda span: span.start_time_unix_nano)


def attribute(span: Span, name: str) -> object:
    """The value of an attribute; KeyError if the span has no such."""
    values = {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}
    return values[name]
