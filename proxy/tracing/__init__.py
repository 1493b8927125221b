"""OpenTelemetry traces: a span for each HTTP request, and below it what its attempts did where."""
