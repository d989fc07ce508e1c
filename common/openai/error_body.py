"""Exception → HTTP status, OpenAI error body and headers; the one place where that is decided (journey row x).

Owns: the table from the tree in `common.errors` to status, `type` and `code`.
Does not know: HTTP servers; whoever answers copies the three fields into its own response.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from common.errors import (
    AuthenticationFailed,
    Bug,
    ClientError,
    ConstraintRejected,
    ContextLengthExceeded,
    EngineError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    NotReady,
    NotSupported,
    OverloadError,
    PayloadTooLarge,
    PDError,
    PermissionRefused,
    QueueFull,
    RateLimited,
    RequestAborted,
    TransferError,
    UpstreamBroken,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnreachable,
)

CONTENT_TYPE = "application/json"
INTERNAL_MESSAGE = "The server failed on this request; its log says why."


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """What goes to the client.

    Attributes:
        status: HTTP status, 4xx or 5xx.
        body: JSON `{"error": {"message", "type", "param", "code"}}`.
        headers: `Content-Type`, and `Retry-After` where trying again makes sense.
    """

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": CONTENT_TYPE})


@dataclass(frozen=True, slots=True)
class _Row:
    status: int
    type: str
    code: str


_TABLE: Mapping[type[BaseException], _Row] = {
    ClientError: _Row(400, "invalid_request_error", "invalid_request"),
    InvalidRequest: _Row(400, "invalid_request_error", "invalid_request"),
    ContextLengthExceeded: _Row(400, "invalid_request_error", "context_length_exceeded"),
    ConstraintRejected: _Row(400, "invalid_request_error", "constraint_rejected"),
    AuthenticationFailed: _Row(401, "authentication_error", "invalid_api_key"),
    PermissionRefused: _Row(403, "permission_error", "permission_denied"),
    NotFound: _Row(404, "not_found_error", "not_found"),
    MethodNotAllowed: _Row(405, "invalid_request_error", "method_not_allowed"),
    PayloadTooLarge: _Row(413, "invalid_request_error", "payload_too_large"),
    RequestAborted: _Row(499, "invalid_request_error", "request_aborted"),
    NotSupported: _Row(501, "not_supported_error", "not_supported"),
    RateLimited: _Row(429, "rate_limit_error", "rate_limit_exceeded"),
    QueueFull: _Row(429, "overloaded_error", "queue_full"),
    NotReady: _Row(503, "service_unavailable_error", "not_ready"),
    OverloadError: _Row(503, "overloaded_error", "overloaded"),
    UpstreamUnreachable: _Row(502, "upstream_error", "upstream_unreachable"),
    UpstreamTimeout: _Row(504, "upstream_error", "upstream_timeout"),
    UpstreamBroken: _Row(502, "upstream_error", "upstream_broken"),
    UpstreamError: _Row(502, "upstream_error", "upstream_failed"),
    TransferError: _Row(502, "kv_transfer_error", "kv_transfer_failed"),
    EngineError: _Row(500, "engine_error", "engine_failed"),
    PDError: _Row(500, "server_error", "internal_error"),
}
_INTERNAL = _Row(500, "server_error", "internal_error")


def error_answer(exc: BaseException) -> ErrorAnswer:
    """Status, body and headers of `exc`; one that is not of our tree, or a `Bug`, shows nothing of its inside.

    Returns:
        The row of the closest class in the exception's own ancestry.
    """
    row, message = _INTERNAL, INTERNAL_MESSAGE
    if isinstance(exc, PDError) and not isinstance(exc, Bug):
        row = next(_TABLE[cls] for cls in type(exc).__mro__ if cls in _TABLE)
        message = str(exc) or row.code.replace("_", " ")
    headers = {"Content-Type": CONTENT_TYPE}
    if isinstance(exc, OverloadError):
        headers["Retry-After"] = str(max(1, round(exc.retry_after_s)))
    param = exc.param if isinstance(exc, ClientError) else None
    return ErrorAnswer(row.status, error_body(message, type_=row.type, code=row.code, param=param), headers)


def error_body(message: str, *, type_: str, code: str, param: str | None = None) -> bytes:
    """The JSON itself, for an answer that no exception stands behind."""
    return msgspec.json.encode({"error": {"message": message, "type": type_, "param": param, "code": code}})
