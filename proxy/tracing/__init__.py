"""OpenTelemetry traces of journeys, over OTLP/HTTP in JSON, without a tracing library.

Owns: trace context, spans, their export. Called by the journey. Must never hold up a request.
"""
