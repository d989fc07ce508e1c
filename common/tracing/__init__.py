"""OpenTelemetry traces over OTLP/HTTP in JSON, without a tracing library.

Owns: trace context, spans, their export. Called by the proxy and by both engines. Must never hold up a request.
Must never know what is traced.
"""
