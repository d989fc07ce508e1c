"""The client's request, read once: top-level fields as raw bytes (journey row 1).

Owns: `Call`, what the proxy itself reads of a body, and splicing fields back together byte for byte.
Does not know: what the fields mean to an engine; values it does not read are never decoded.
"""

from collections.abc import Mapping
from functools import lru_cache

import msgspec

from common.clock import Deadline
from common.errors import InvalidRequest
from common.tracing.context import HEADER as TRACE
from common.tracing.context import TraceContext

Fields = Mapping[str, bytes | msgspec.Raw]
"""Field name → its JSON exactly as the client spelled it."""

NULL = b"null"
CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
TIMELINE = "timeline"
KV_PARAMS = "kv_transfer_params"
# vLLM's older spelling of `structured_outputs`; the engines still read it.
_LEGACY_KINDS = {
    "guided_json": "json",
    "guided_json_object": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}
_OUTPUT_FIELDS = frozenset({"structured_outputs", "response_format", *_LEGACY_KINDS})
CONSTRAINT_FIELDS = ("response_format", "structured_outputs", *_LEGACY_KINDS, "guided_whitespace_pattern")
_FORCES_NOTHING = (NULL, b'"none"', b'"auto"')
_STRUCTURED_OUTPUT_KINDS = {
    "json": "json",
    "json_object": "json",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}

_top_level = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text = msgspec.json.Decoder(str)
_flag = msgspec.json.Decoder(bool)


class _TypeOnly(msgspec.Struct):
    type: str = "text"


class _Function(msgspec.Struct):
    strict: bool | None = None


class _Tool(msgspec.Struct):
    function: _Function


_format_type = msgspec.json.Decoder(_TypeOnly)
_tools = msgspec.json.Decoder(list[_Tool])


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the proxy sees it.

    Attributes:
        path: the OpenAI path, e.g. `/v1/completions`.
        fields: the body's top level without what is not for engines (`timeline`, client-sent `kv_transfer_params`).
        headers: the headers that both legs carry.
        request_id: the client's label, or one made here; echoed to the client.
        model: the `model` field, if it is a string.
        kind: metric label of the constraint; DESIGN §7.
        is_constrained: whether any field asks for structured output, well-formed or not.
        wants_timeline: the opt-in field `timeline`.
        num_body_bytes: size of the body, a stand-in for its length in tokens.
        received_s: when the request came in, in the proxy's clock.
        deadline: when the first byte must have left.
        trace: where the request stands in its trace; None where nothing is traced.
    """

    path: str
    fields: Fields
    headers: Mapping[str, str]
    request_id: str
    model: str | None
    kind: str
    is_constrained: bool
    wants_timeline: bool
    num_body_bytes: int
    received_s: float
    deadline: Deadline
    trace: TraceContext | None = None

    def headers_of(self, leg: str) -> Mapping[str, str]:
        """The headers of one leg: where the request is traced, the leg's own span is what they name."""
        return self.headers if self.trace is None else {**self.headers, TRACE: self.trace.traceparent_of(leg)}


def parse_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """The top level of a JSON object; values stay undecoded.

    Raises:
        InvalidRequest: not a JSON object.
    """
    try:
        return _top_level.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not a JSON object: {error}") from error


def render(fields: Fields) -> bytes:
    """The object with exactly these fields, in this order, each value as it was spelled."""
    return b"{" + b",".join([b"%b:%b" % (_spelled(name), raw) for name, raw in fields.items()]) + b"}"


@lru_cache(maxsize=1024)
def _spelled(name: str) -> bytes:
    return msgspec.json.encode(name)


def make_call(
    path: str, body: bytes, *, headers: Mapping[str, str], request_id: str, received_s: float, deadline: Deadline
) -> Call:
    """Read what the proxy must know and drop what clients may not say.

    Raises:
        InvalidRequest: not a JSON object, or `timeline` is not a boolean.
    """
    fields = parse_fields(body)
    fields.pop(KV_PARAMS, None)
    timeline = fields.pop(TIMELINE, None)
    kind = constraint_kind(fields, path)
    return Call(
        path=path,
        fields=fields,
        headers=headers,
        request_id=request_id,
        model=text_of(fields.get("model")),
        kind=kind or "free",
        is_constrained=kind is not None,
        wants_timeline=timeline is not None and _boolean(TIMELINE, timeline),
        num_body_bytes=len(body),
        received_s=received_s,
        deadline=deadline,
    )


def text_of(raw: msgspec.Raw | bytes | None) -> str | None:
    """The string `raw` spells, or None when it is no string: complaining is the engines' part."""
    try:
        return None if raw is None else _text.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _boolean(name: str, raw: msgspec.Raw) -> bool:
    if bytes(raw) == NULL:
        return False
    try:
        return _flag.decode(raw)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"`{name}` must be true or false", param=name) from error


def forces_tool(fields: Fields) -> bool:
    """Whether `tool_choice` is one that constrains the answer (`required` or a named tool)."""
    choice = fields.get("tool_choice")
    return choice is not None and bytes(choice) not in _FORCES_NOTHING


def keeps_own_calls(fields: Fields) -> bool:
    """Whether calls of the model's own accord must fit a `strict` tool (`tool_choice` auto, or left out)."""
    raw, choice = fields.get("tools"), bytes(fields.get("tool_choice", NULL))
    if raw is None or choice not in (NULL, b'"auto"') or b'"strict"' not in bytes(raw):
        return False
    try:
        return any(tool.function.strict for tool in _tools.decode(raw))
    except msgspec.MsgspecError:
        return False


def constraint_kind(fields: Fields, path: str) -> str | None:
    """Metric label of the structured-output fields, by a shallow look; None when nothing is constrained.

    Tools exist in chats only; elsewhere `tool_choice` is a field like any other.

    A malformed constraint counts as one (labelled `json`), so that the engine gets to refuse it early.
    """
    if path == CHAT_PATH and forces_tool(fields):
        return "tool"
    kind = _output_kind(fields)
    return "tool" if kind is None and path == CHAT_PATH and keeps_own_calls(fields) else kind


def _output_kind(fields: Fields) -> str | None:
    if _OUTPUT_FIELDS.isdisjoint(fields):
        return None
    if (raw := fields.get("structured_outputs")) is not None and bytes(raw) != NULL:
        kind = _structured_outputs_kind(raw)
        if kind is not None:
            return kind
    if (raw := fields.get("response_format")) is not None and bytes(raw) != NULL:
        try:
            format_type = _format_type.decode(raw).type
        except msgspec.MsgspecError:
            return "json"
        return {"text": None, "structural_tag": "structural_tag"}.get(format_type, "json")
    return next((kind for name, kind in _LEGACY_KINDS.items() if bytes(fields.get(name, NULL)) != NULL), None)


def _structured_outputs_kind(raw: msgspec.Raw | bytes) -> str | None:
    try:
        parts = _top_level.decode(raw)
    except msgspec.MsgspecError:
        return "json"
    for name, value in parts.items():
        if name in _STRUCTURED_OUTPUT_KINDS and bytes(value) != NULL:
            return _STRUCTURED_OUTPUT_KINDS[name]
    return None
