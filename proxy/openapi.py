"""The published description of the HTTP surface (OpenAPI 3.1), served at `/openapi.json`.

Owns: what clients may send, as far as the proxy itself reads it; all other body fields are the engines' and allowed.
Does not know: handlers.
"""

import msgspec

_ERROR = {"$ref": "#/components/schemas/Error"}
_KNOWN_ERRORS = {
    "400": "The request is at fault.",
    "401": "No API key, or a wrong one.",
    "403": "Administration is off.",
    "404": "No such model or path.",
    "413": "The body is too large.",
    "429": "Too many requests; see Retry-After.",
    "499": "Aborted by its id.",
    "500": "An engine failed on this request.",
    "502": "An engine broke off.",
    "503": "No engine is ready; see Retry-After.",
    "504": "An engine did not answer in time.",
}


def _errors() -> dict[str, object]:
    content = {"application/json": {"schema": _ERROR}}
    return {status: {"description": text, "content": content} for status, text in _KNOWN_ERRORS.items()}


def _answer(text: str, *types: str) -> dict[str, object]:
    return {"description": text, "content": {type_: {} for type_ in types or ("application/json",)}}


def _post(summary: str, body: dict[str, object], answer: dict[str, object]) -> dict[str, object]:
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": {"200": answer, **_errors()},
        }
    }


def _get(summary: str, answer: dict[str, object], *errors: str) -> dict[str, object]:
    known = _errors()
    return {"get": {"summary": summary, "responses": {"200": answer, **{status: known[status] for status in errors}}}}


def _object(required: tuple[str, ...], **properties: object) -> dict[str, object]:
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": True}


_TEXT = {"type": "string"}
_FLAG = {"type": "boolean"}
_ITEMS = {"type": "array", "items": {"type": "object"}}
_PROMPT = {
    "oneOf": [
        _TEXT,
        {"type": "array", "items": _TEXT},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}
_COMMON = {"model": _TEXT, "stream": _FLAG, "timeline": _FLAG, "response_format": {"type": "object"}}
_STREAMED = ("application/json", "text/event-stream")
_FLEET_ORDER = _object(
    ("action", "role", "url"),
    action={"enum": ["add", "drain", "undrain", "remove"]},
    role={"enum": ["prefill", "decode"]},
    url=_TEXT,
)

_PATHS: dict[str, object] = {
    "/v1/completions": _post(
        "Complete one or several prompts.",
        _object(("prompt",), prompt=_PROMPT, **_COMMON),
        _answer("Text.", *_STREAMED),
    ),
    "/v1/chat/completions": _post(
        "Answer a chat.",
        _object(("messages",), messages=_ITEMS, tools=_ITEMS, **_COMMON),
        _answer("A message.", *_STREAMED),
    ),
    "/v1/responses": _post(
        "The Responses API without stored state.",
        _object(("input",), input={"oneOf": [_TEXT, _ITEMS]}, model=_TEXT, stream=_FLAG),
        _answer("A response.", *_STREAMED),
    ),
    "/tokenize": _post("Token ids of a prompt.", _object(()), _answer("Tokens.")),
    "/detokenize": _post("Text of token ids.", _object(("tokens",)), _answer("Text.")),
    "/abort": _post("End a request by its id.", _object(("request_id",), request_id=_TEXT), _answer("How many.")),
    "/v1/models": _get("Models of all engines.", _answer("Models."), "401", "503"),
    "/health": _get("Whether the process lives.", _answer("It does.")),
    "/ready": _get("Whether requests can be served.", _answer("They can."), "503"),
    "/metrics": _get("Prometheus metrics.", _answer("Metrics.", "text/plain")),
    "/openapi.json": _get("This description.", _answer("It.")),
    "/admin/fleet": {
        **_get("Every engine.", _answer("Engines."), "401", "403"),
        **_post("Change the fleet.", _FLEET_ORDER, _answer("Every engine.")),
    },
}
_ERROR_SCHEMA = _object(
    ("error",),
    error=_object(
        ("message", "type", "param", "code"),
        message=_TEXT,
        type=_TEXT,
        param={"type": ["string", "null"]},
        code={"type": ["string", "integer", "null"]},
    ),
)


def description() -> bytes:
    """The document as JSON."""
    security = {"bearer": {"type": "http", "scheme": "bearer"}}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "pd-proxy", "version": "1", "description": "OpenAI's API on prefill/decode engines."},
            "paths": _PATHS,
            "components": {"schemas": {"Error": _ERROR_SCHEMA}, "securitySchemes": security},
            "security": [{}, {"bearer": []}],
        }
    )
