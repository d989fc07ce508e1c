"""The one exception tree; HTTP status and OpenAI body of each are decided in `common.openai.error_body`.

PDError
├── ClientError                 the request is at fault (4xx); `param` names the field
│   ├── InvalidRequest          400
│   │   ├── ContextLengthExceeded
│   │   └── ConstraintRejected  the constraint cannot be compiled or exactly enforced; says why
│   ├── AuthenticationFailed    401
│   ├── PermissionRefused       403
│   ├── NotFound                404
│   ├── MethodNotAllowed        405
│   ├── PayloadTooLarge         413
│   ├── RequestAborted          499, ended by its id on somebody's demand
│   └── NotSupported            501
├── OverloadError               try again later (429 / 503, Retry-After)
│   ├── RateLimited             429
│   ├── QueueFull               429
│   └── NotReady                503
├── UpstreamError               a leg of the proxy failed (502 / 504)
│   ├── UpstreamUnreachable     502
│   ├── UpstreamTimeout         504
│   └── UpstreamBroken          502, the answer made no sense or stopped half-way
├── TransferError               KV did not move; policy decides between recompute and 5xx
│   ├── HandshakeFailed
│   │   └── IncompatiblePeer    names the setting that differs
│   ├── ReferenceRefused        unsigned, stale, consumed, foreign or out of bounds
│   ├── PeerDisconnected
│   └── TransferTimedOut
├── EngineError                 500: this engine failed this request
│   ├── NoTokenAllowed          every token of the row is masked
│   └── GrammarDesynced         a sampled token was refused by its own grammar
├── StartupError                one clear line, exit 1 (port taken, model missing, shape mismatch)
│   └── ConfigError             one clear line, exit 2: file, key and what is allowed
└── Bug                         our own mistake
    └── IllegalTransition
"""


class PDError(Exception):
    """Root of the tree."""


class ClientError(PDError):
    """The request is at fault.

    Args:
        message: what is wrong and what would be right, for the person who sent it.
        param: the body field at fault (dotted path), or None.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(ClientError):
    """A malformed, contradictory or unsupported field."""


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus asked-for output does not fit the model."""


class ConstraintRejected(InvalidRequest):
    """The structured-output constraint cannot be compiled within its limits, or not enforced exactly."""


class AuthenticationFailed(ClientError):
    """No key, or a wrong one."""


class PermissionRefused(ClientError):
    """The key is right but does not open this door."""


class NotFound(ClientError):
    """Unknown path or model."""


class MethodNotAllowed(ClientError):
    """Known path, wrong verb."""


class PayloadTooLarge(ClientError):
    """Body over the configured cap."""


class RequestAborted(ClientError):
    """Ended before its time because somebody asked for that."""


class NotSupported(ClientError):
    """A real feature of the API that this deployment does not offer."""


class OverloadError(PDError):
    """Nothing is wrong with the request; there is no room for it now.

    Args:
        message: what is missing.
        retry_after_s: when trying again makes sense.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class RateLimited(OverloadError):
    """This key used up its share."""


class QueueFull(OverloadError):
    """The waiting room is full or waiting took too long."""


class NotReady(OverloadError):
    """No engine of a needed role is ready."""


class UpstreamError(PDError):
    """A leg of the proxy failed."""


class UpstreamUnreachable(UpstreamError):
    """No connection, or it was refused."""


class UpstreamTimeout(UpstreamError):
    """The engine did not answer in time."""


class UpstreamBroken(UpstreamError):
    """The engine's answer broke off or made no sense."""


class TransferError(PDError):
    """KV did not move."""


class HandshakeFailed(TransferError):
    """The peer could not be reached, or answered nonsense."""


class IncompatiblePeer(HandshakeFailed):
    """The peer's settings differ; the message names them."""


class ReferenceRefused(TransferError):
    """A reference that must never be read: unsigned, stale, consumed, foreign or out of bounds."""


class PeerDisconnected(TransferError):
    """The peer went away during a transfer."""


class TransferTimedOut(TransferError):
    """The transfer did not end in time."""


class EngineError(PDError):
    """The engine failed one request."""


class NoTokenAllowed(EngineError):
    """The row's masks leave no token."""


class GrammarDesynced(EngineError):
    """A sampled token was refused by its own grammar."""


class StartupError(PDError):
    """The process cannot start; one line says why (exit 1)."""


class ConfigError(StartupError):
    """The config file is wrong; one line says where (exit 2)."""


class Bug(PDError):
    """Our own mistake."""


class IllegalTransition(Bug):
    """A move that the transition table does not have."""
